"""Changes that make a run fit: each is planned again from its own flags."""

import shlex
from dataclasses import replace
from math import inf
from time import perf_counter

import pytest

from redline.config import parse_args
from redline.hardware import hardware_named
from redline.plan import make_plan
from redline.plan.lighter import advice, lighter_changes

H200 = hardware_named("h200")
EIGHT = "--preset llama3-8b --bf16 --train-iters 1 --seq-length 8192 --micro-batch-size 1"


def planned(words, hardware=H200, ranks=1):
    config = parse_args(shlex.split(words)).config
    return config, make_plan(config, hardware, config.model.vocab_size, ranks)


@pytest.mark.parametrize(
    "words",
    [EIGHT, EIGHT.replace("size 1", "size 4 --num-layers 16"), "--preset llama3.2-1b --bf16 --train-iters 1 "
     "--seq-length 65536 --micro-batch-size 2"],
)  # fmt: skip
def test_each_change_would_fit_as_it_is_typed(words):
    config, plan = planned(words)
    assert plan.memory.reserved > H200.memory_bytes
    changes = lighter_changes(config, plan, H200, H200.memory_bytes, seconds=inf)
    assert len(changes) == 3 and [each.cost for each in changes] == sorted(each.cost for each in changes)
    for change in changes:
        _, lighter = planned(f"{words} {change.flags}")
        assert lighter.memory.reserved == change.reserved_bytes <= H200.memory_bytes
        assert change.flags in advice(changes)


def test_the_whole_8b_fits_one_card_by_storage():
    """fp32 everything does not; a bf16 parameter with its remainder and bf16 moments does."""
    config, plan = planned(EIGHT)
    assert any("--use-precision-aware-optimizer" in each.flags for each in lighter_changes(
        config, plan, H200, H200.memory_bytes, count=10, seconds=inf
    ))  # fmt: skip


def test_nothing_helps():
    config, plan = planned("--preset llama3-70b --bf16 --train-iters 1 --seq-length 4096")
    assert lighter_changes(config, plan, H200, H200.memory_bytes) == []
    assert "smaller model or more devices" in advice([])


def test_what_costs_nothing_is_offered_first_where_ranks_can_share():
    """The 8B on 8 cards needs 175 GiB a rank; a distributed optimizer alone saves 79 of them."""
    config, plan = planned(EIGHT, ranks=8)
    first = lighter_changes(config, plan, H200, 110 << 30, seconds=inf)[0]
    assert first.flags == "--use-distributed-optimizer" and first.cost == 0 and first.host_bytes == 0


def test_a_microbatch_shrinks_as_far_as_it_must():
    config, plan = planned(
        "--preset llama3.2-1b --bf16 --train-iters 1 --seq-length 8192 --micro-batch-size 64"
    )
    found = lighter_changes(config, plan, H200, H200.memory_bytes, count=20, seconds=inf)
    sizes = [each.flags for each in found if each.flags.startswith("--micro-batch-size")]
    assert sizes and "--micro-batch-size 32" not in sizes[0] and "--global-batch-size 64" in sizes[0]


def test_leaving_it_to_the_search_and_states_elsewhere_are_offered():
    """Also where PCIe's rate is not known; with the bytes of the host's memory."""
    unknown = replace(H200, pcie_bytes_per_s=None)
    config, plan = planned(
        "--preset llama3-8b --num-layers 8 --bf16 --train-iters 1 --seq-length 8192", unknown
    )
    limit = plan.memory.reserved - (1 << 30)
    found = lighter_changes(config, plan, unknown, limit, count=30, seconds=inf)
    auto = next(each for each in found if "--recompute auto" in each.flags)
    assert "--memory-budget" in auto.flags
    away = next(each for each in found if each.flags == "--optimizer-cpu-offload")
    assert away.host_bytes == pytest.approx(12 * plan.parameters.total, rel=1e-3)
    assert "of the host's a rank" in str(away)


def test_advice_does_not_keep_a_run_waiting():
    """Beside the auto search all combinations would take 40 s; no trial begins when time is up."""
    config, plan = planned(f"{EIGHT} --recompute auto")
    start = perf_counter()
    lighter_changes(config, plan, H200, 30 << 30, seconds=0.5)
    assert perf_counter() - start < 5
