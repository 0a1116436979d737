"""Schedules: Megatron's curves, written down a second time and held at their joints."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import ConfigError
from redline.plan import LrSchedule, ScheduleSpec, WeightDecaySchedule

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def make(style="cosine", **other):
    facts = {"max_lr": 1e-3, "min_lr": 1e-5, "init_lr": 1e-6, "warmup": 100, "decay": 1000, "wsd_decay": 200}
    return LrSchedule(style=style, **(facts | other))


@pytest.mark.parametrize("style", STYLES)
def test_warmup(style):
    """The first step runs at the warm-up's start, half way at half, its last sample at the peak."""
    schedule = make(style)
    assert schedule.lr(0) == 1e-6
    assert schedule.lr(50) == pytest.approx((1e-6 + 1e-3) / 2)
    assert schedule.lr(100) == pytest.approx(1e-3)
    assert make(style, init_lr=0.0).lr(0) == 0.0


@pytest.mark.parametrize("style", STYLES)
def test_without_warmup_the_first_step_is_at_the_peak(style):
    assert make(style, warmup=0).lr(0) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("style", "rate"),
    [
        ("constant", 1e-3),
        ("linear", 1e-5 + 0.5 * 0.99e-3),
        ("cosine", 1e-5 + 0.5 * 0.99e-3),
        ("inverse-square-root", 1e-3 * math.sqrt(100 / 550)),
        ("WSD", 1e-3),
    ],
)
def test_half_way_through_the_decay(style, rate):
    assert make(style).lr(550) == pytest.approx(rate)


def test_a_quarter_of_a_cosine():
    assert make().lr(325) == pytest.approx(1e-5 + 0.99e-3 * 0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize(
    ("wsd_style", "left"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 * (1 + math.cos(math.pi / 4))),
        ("minus_sqrt", 0.5),
        ("exponential", 2 * 0.5**0.25 - 1),
    ],
)
def test_the_final_decay_of_wsd(wsd_style, left):
    schedule = make("WSD", wsd_style=wsd_style)
    assert schedule.lr(800) == pytest.approx(1e-3)
    assert schedule.lr(850) == pytest.approx(1e-5 + left * 0.99e-3)
    assert schedule.lr(1000) == pytest.approx(1e-5)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.sampled_from(STYLES), st.floats(0, 2000), st.floats(0, 2000))
def test_rates_stay_in_bounds_and_fall(style, one, other):
    schedule = make(style, wsd_style="cosine")
    early, late = sorted((one, other))
    assert 1e-6 <= schedule.lr(early) <= 1e-3
    if early >= 100:
        assert schedule.lr(late) <= schedule.lr(early) * (1 + 1e-12)
    if late > 1000:
        assert schedule.lr(late) == (1e-3 if style == "constant" else 1e-5)


def test_inverse_square_root_without_warmup():
    schedule = make("inverse-square-root", warmup=0)
    assert schedule.lr(1) == schedule.lr(0) == 1e-3
    assert schedule.lr(400) == pytest.approx(1e-3 / 20)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"warmup": 1000}, "warmup-before-decay"),
        ({"decay": 0, "warmup": 0}, "warmup-before-decay"),
        ({"min_lr": 2e-3}, "rates-ordered"),
        ({"init_lr": 2e-3}, "rates-ordered"),
        ({"style": "WSD", "wsd_decay": 0}, "wsd-length"),
        ({"style": "WSD", "wsd_decay": 1001}, "wsd-length"),
    ],
)
def test_impossible_schedules(values, rule):
    with pytest.raises(ConfigError, match=rule):
        make(**values)


def test_weight_decay():
    constant = WeightDecaySchedule(start=0.1, end=0.1)
    assert constant.weight_decay(0) == constant.weight_decay(10**9) == 0.1
    linear = WeightDecaySchedule(start=0.0, end=0.4, style="linear", length=100)
    cosine = WeightDecaySchedule(start=0.0, end=0.4, style="cosine", length=100)
    assert [linear.weight_decay(at) for at in (0, 25, 100, 101)] == pytest.approx([0, 0.1, 0.4, 0.4])
    rise = 0.5 * (math.cos(math.pi * 0.75) + 1)
    assert [cosine.weight_decay(at) for at in (0, 25, 100, 101)] == pytest.approx([0, 0.4 * rise, 0.4, 0.4])
    with pytest.raises(ConfigError, match="weight-decay-ends"):
        WeightDecaySchedule(start=0.0, end=0.1)


def test_what_wins_on_resume_is_told_by_the_stored_values():
    """B110: 6e-4 constant in the checkpoint, 3e-5 cosine now: the new spec starts at 3e-5, and what is stored
    of the two differs."""
    decay = WeightDecaySchedule(start=0.1, end=0.1)
    saved = ScheduleSpec(main=LrSchedule(max_lr=6e-4, style="constant", decay=100), decay=decay)
    now = ScheduleSpec(main=LrSchedule(max_lr=3e-5, style="cosine", decay=100), decay=decay)
    assert now.lr(0) == 3e-5 and saved.lr(0) == 6e-4
    before, after = saved.as_dict()["main"], now.as_dict()["main"]
    assert {key for key in before if before[key] != after[key]} == {"max_lr", "style"}


def test_decoupled_rate():
    decay = WeightDecaySchedule(start=0.1, end=0.1)
    alone = ScheduleSpec(main=make(), decay=decay)
    assert alone.decoupled_lr(50) is None
    both = ScheduleSpec(main=make(), decay=decay, decoupled=make(max_lr=1e-4))
    assert both.decoupled_lr(100) == pytest.approx(1e-4) and both.lr(100) == pytest.approx(1e-3)
