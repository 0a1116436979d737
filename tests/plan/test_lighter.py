"""Changes that make a run fit: each is planned again from its own flags."""

import shlex

import pytest

from redline.config import parse_args
from redline.hardware import hardware_named
from redline.plan import make_plan
from redline.plan.lighter import advice, lighter_changes

H200 = hardware_named("h200")
EIGHT = "--preset llama3-8b --bf16 --train-iters 1 --seq-length 8192 --micro-batch-size 1"


def planned(words):
    config = parse_args(shlex.split(words)).config
    return config, make_plan(config, H200, config.model.vocab_size)


@pytest.mark.parametrize(
    "words",
    [EIGHT, EIGHT.replace("size 1", "size 4 --num-layers 16"), "--preset llama3.2-1b --bf16 --train-iters 1 "
     "--seq-length 65536 --micro-batch-size 2"],
)  # fmt: skip
def test_each_change_would_fit_as_it_is_typed(words):
    config, plan = planned(words)
    assert plan.memory.reserved > H200.memory_bytes
    changes = lighter_changes(config, plan, H200, H200.memory_bytes)
    assert len(changes) == 3 and [each.cost for each in changes] == sorted(each.cost for each in changes)
    for change in changes:
        _, lighter = planned(f"{words} {change.flags}")
        assert lighter.memory.reserved == change.reserved_bytes <= H200.memory_bytes
        assert change.flags in advice(changes)


def test_the_whole_8b_fits_one_card_by_storage():
    """fp32 everything does not; a bf16 parameter with its remainder and bf16 moments does."""
    config, plan = planned(EIGHT)
    assert any("--use-precision-aware-optimizer" in each.flags for each in lighter_changes(
        config, plan, H200, H200.memory_bytes, count=10
    ))  # fmt: skip


def test_nothing_helps():
    config, plan = planned("--preset llama3-70b --bf16 --train-iters 1 --seq-length 4096")
    assert lighter_changes(config, plan, H200, H200.memory_bytes) == []
    assert "smaller model or more devices" in advice([])
