from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import CheckpointError, ConfigError
from redline.optim.loss_scale import ConstantLossScale, DynamicLossScale, make_loss_scale

# (overflow?, scale after, hysteresis left after) for scale 16, floor 2, window 3, hysteresis 2: by hand.
TABLE = [
    (True, 16, 1),  # the first overflow is forgiven
    (False, 16, 1),
    (True, 8, 0),  # the second is not, also with a clean step between
    (True, 4, -1),  # nothing left to forgive until the scale has grown
    (False, 4, -1),
    (False, 4, -1),
    (True, 2, -2),  # an overflow restarts the window
    (True, 2, -3),  # the floor
    (False, 2, -3),
    (False, 2, -3),
    (False, 4, 2),  # three clean steps in a row: growth, and hysteresis refilled
    (True, 4, 1),
    (False, 4, 1),
    (False, 4, 1),
    (False, 8, 2),
    (False, 8, 2),
    (False, 8, 2),
    (False, 16, 2),
]


def make() -> DynamicLossScale:
    return DynamicLossScale(scale=16.0, min_scale=2.0, window=3, hysteresis=2)


def test_sequence():
    scaler = make()
    for row, (overflow, scale, left) in enumerate(TABLE):
        scaler.update(overflow)
        assert (scaler.scale, scaler.hysteresis_left) == (scale, left), f"row {row}"


@settings(derandomize=True, max_examples=50, deadline=None)
@given(before=st.lists(st.booleans(), max_size=20), after=st.lists(st.booleans(), max_size=20))
def test_state_goes_through_json(before, after):
    scaler, resumed = make(), make()
    for overflow in before:
        scaler.update(overflow)
    resumed.load_state_values(json.loads(json.dumps(scaler.state_values())))
    assert resumed == scaler
    for overflow in after:
        scaler.update(overflow)
        resumed.update(overflow)
    assert resumed == scaler


def test_overflow_is_expected_until_the_floor():
    scaler = DynamicLossScale(scale=4.0, min_scale=2.0, hysteresis=1)
    assert scaler.expects_overflow()
    scaler.update(True)
    assert scaler.scale == 2.0 and not scaler.expects_overflow()


def test_constant_scale_never_moves_and_keeps_no_state():
    scaler = ConstantLossScale(128.0)
    scaler.update(True)
    scaler.load_state_values(make().state_values())
    assert scaler.scale == 128.0 and scaler.state_values() == {} and not scaler.expects_overflow()


def test_dynamic_scale_starts_afresh_after_a_run_without_one():
    scaler = make()
    scaler.load_state_values({})
    assert scaler == make()


def test_a_smaller_window_and_hysteresis_act_after_a_resume():
    before = DynamicLossScale(scale=16.0, window=10, hysteresis=5)
    for _ in range(7):
        before.update(False)
    resumed = make()
    resumed.load_state_values(before.state_values())
    assert resumed.hysteresis_left == 2
    resumed.update(False)
    assert (resumed.scale, resumed.clean_steps) == (32.0, 0), "8 clean steps are more than the window of 3"
    resumed.update(True)
    resumed.update(True)
    assert resumed.scale == 16.0


def test_half_a_state_is_refused():
    with pytest.raises(CheckpointError, match="clean_steps"):
        make().load_state_values({"scale": 2.0, "hysteresis_left": 1})


@pytest.mark.parametrize(
    "arguments", [{"scale": 0.5}, {"min_scale": 0.0}, {"window": 0}, {"hysteresis": 0}, {"min_scale": -1.0}]
)
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ConfigError, match="--"):
        DynamicLossScale(**arguments)


def test_make_loss_scale():
    assert make_loss_scale(loss_scaling=False) == ConstantLossScale(1.0)
    assert make_loss_scale(loss_scaling=True) == DynamicLossScale(2.0**32, 1.0, 1000, 2)
    assert make_loss_scale(loss_scaling=True, loss_scale=512.0) == ConstantLossScale(512.0)
    assert make_loss_scale(
        loss_scaling=True, initial_scale=64.0, min_scale=8.0, window=5, hysteresis=3
    ) == DynamicLossScale(64.0, 8.0, 5, 3)
