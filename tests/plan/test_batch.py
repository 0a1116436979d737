"""Batch sizes over a run, against a step-by-step simulation of the definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import ConfigError
from redline.plan import Reached, make_batch_schedule, ramp_up


def constant(size=8, micro=2, dp=2, **length):
    return make_batch_schedule([(0, size)], micro_batch_size=micro, dp=dp, **(length or {"train_iters": 10}))


def test_constant():
    schedule = constant()
    assert schedule.is_constant and schedule.final_batch_size == 8
    assert [schedule.num_microbatches(samples) for samples in (0, 8, 800)] == [2, 2, 2]
    assert schedule.total_samples == 80 and schedule.samples_at(3) == 24
    assert schedule.iteration_at(23) == 2 and schedule.iteration_at(24) == 3


def test_samples_that_fill_no_step_are_left_out():
    schedule = constant(train_samples=39)
    assert schedule.total_iterations == 4 and schedule.total_samples == 32
    with pytest.raises(ConfigError, match="samples-fill-a-step"):
        constant(train_samples=7)


@pytest.mark.parametrize(("size", "near"), [(6, "4 or 8"), (2, "use 4,"), (9, "8 or 12")])
def test_batches_that_ranks_cannot_share(size, near):
    with pytest.raises(ConfigError, match=near) as error:
        constant(size)
    assert "batch-of-ranks" in str(error.value) and f"--global-batch-size {size}" in str(error.value)


def test_decrease_if_needed():
    schedule = make_batch_schedule(
        [(0, 11)], micro_batch_size=2, dp=2, train_iters=1, decrease_if_needed=True
    )
    assert schedule.final_batch_size == 8
    with pytest.raises(ConfigError):
        make_batch_schedule([(0, 3)], micro_batch_size=2, dp=2, train_iters=1, decrease_if_needed=True)


def test_ramp_up_is_megatrons():
    """16, 32, 48, 64 at equal distances over 300 samples; a batch size holds for whole steps."""
    assert ramp_up(16, 16, 300, 64) == [(0, 16), (100, 32), (200, 48), (300, 64)]
    schedule = make_batch_schedule(ramp_up(16, 16, 300, 64), micro_batch_size=1, dp=1, train_iters=20)
    # 7 steps of 16 reach 112 samples, 3 of 32 reach 208, 2 of 48 reach 304
    assert [schedule.samples_at(i) for i in (0, 7, 10, 12, 13)] == [0, 112, 208, 304, 368]
    assert [schedule.global_batch_size(s) for s in (0, 96, 112, 208, 304)] == [16, 16, 32, 48, 64]
    assert schedule.final_batch_size == 64 and not schedule.is_constant


def test_ramps_that_go_nowhere():
    assert ramp_up(64, 16, 300, 64) == [(0, 64)]
    for start, increment, final in ((64, 16, 32), (16, 16, 40), (16, 0, 32)):
        with pytest.raises(ConfigError, match="rampup-batch-size"):
            ramp_up(start, increment, 300, final)


@st.composite
def schedules(draw):
    micro, dp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    starts = [0, *sorted(draw(st.lists(st.integers(0, 300), max_size=5)))]
    sizes = draw(st.lists(st.integers(1, 6), min_size=len(starts), max_size=len(starts)))
    thresholds = [(start, size * micro * dp) for start, size in zip(starts, sizes, strict=True)]
    return thresholds, micro, dp


@settings(max_examples=80, derandomize=True, deadline=None)
@given(schedules(), st.integers(1, 60))
def test_against_simulation(drawn, iterations):
    """Each step takes the size of the last threshold at or before the samples consumed so far."""
    thresholds, micro, dp = drawn
    schedule = make_batch_schedule(thresholds, micro_batch_size=micro, dp=dp, train_iters=iterations)
    consumed = 0
    for iteration in range(iterations):
        size = [size for start, size in thresholds if start <= consumed][-1]
        assert schedule.samples_at(iteration) == consumed
        assert schedule.iteration_at(consumed) == schedule.iteration_at(consumed + size - 1) == iteration
        assert schedule.global_batch_size(consumed) == size
        assert schedule.num_microbatches(consumed) * micro * dp == size
        consumed += size
    assert schedule.total_samples == consumed
    by_samples = make_batch_schedule(thresholds, micro_batch_size=micro, dp=dp, train_samples=consumed)
    assert by_samples.total_iterations == iterations


@settings(max_examples=80, derandomize=True, deadline=None)
@given(schedules(), schedules(), st.integers(1, 60), st.integers(0, 60), st.integers(0, 60))
def test_other_batches_from_a_resume_on(before, after, done, left, then):
    """Steps done keep their place, those left follow the new thresholds; resumed again, it is the same."""
    old = make_batch_schedule(before[0], micro_batch_size=before[1], dp=before[2], train_iters=done)
    reached = Reached(done, old.total_samples, old.until(done))
    thresholds, micro, dp = after
    sizes = {"micro_batch_size": micro, "dp": dp}
    new = make_batch_schedule(thresholds, **sizes, train_iters=done + left, reached=reached)
    assert [new.samples_at(each) for each in range(done)] == [old.samples_at(each) for each in range(done)]
    consumed = old.total_samples
    for iteration in range(done, done + left):
        size = [size for start, size in thresholds if start <= consumed][-1]
        assert new.samples_at(iteration) == consumed and new.iteration_at(consumed) == iteration
        assert new.global_batch_size(consumed) == size
        consumed += size
    assert new.total_samples == consumed
    later = done + min(left, then)
    again = Reached(later, new.samples_at(later), new.until(later))
    same = make_batch_schedule(thresholds, **sizes, train_samples=consumed, reached=again)
    assert same.segments == new.segments and same.total_iterations == done + left


def test_steps_that_are_not_known_took_the_same_on_average():
    """A checkpoint of an earlier release says how many there were, and of how many samples."""
    schedule = constant(16, reached=Reached(6, 48), train_iters=10)
    assert [schedule.samples_at(each) for each in (0, 3, 6, 7, 10)] == [0, 24, 48, 64, 112]
    assert [schedule.iteration_at(each) for each in (0, 24, 48, 64)] == [0, 3, 6, 7]
    assert schedule.global_batch_size(0) == 16 and schedule.new_from == 6
