"""Memory that tensor-parallel peers write: beside the allocator's peak, in what must be free."""

from __future__ import annotations

from dataclasses import replace

import pytest
from formula_shapes import LLAMA3_8B

from redline.config import parse_args
from redline.formulas.activations import MicrobatchShape
from redline.formulas.memory import training_memory
from redline.formulas.state import StateDtypes
from redline.formulas.tp_traffic import TURNS, pushed_turn_bytes, symmetric_workspace_bytes
from redline.hardware import hardware_named
from redline.plan import make_plan
from redline.plan.cost_memory import rank_memory
from redline.plan.cost_setup import setup_of

RUN = MicrobatchShape(seq_length=8192, micro_batch_size=2, tp=2, sequence=True)
PUSHED, SYMMETRIC = 512 << 20, 128 << 20  # 4 T H and 2 T/tp H elements of 2 bytes


@pytest.mark.parametrize(
    ("joined", "areas"),
    [
        ("", {}),
        ("pushed", {"pushed_area": PUSHED}),
        ("symmetric", {"symmetric_area": SYMMETRIC}),
        ("auto", {"pushed_area": PUSHED, "symmetric_area": SYMMETRIC}),
    ],
)
def test_areas_are_reserved_and_no_part_of_the_peak(joined, areas):
    """The allocator does not count them, so the peak that is compared with its count does not either."""
    assert TURNS * pushed_turn_bytes(LLAMA3_8B, RUN) == PUSHED
    assert symmetric_workspace_bytes(LLAMA3_8B, RUN, 2) == SYMMETRIC
    plain = training_memory(LLAMA3_8B, RUN, StateDtypes()).fullest
    stage = training_memory(LLAMA3_8B, replace(RUN, joined=joined), StateDtypes()).fullest
    assert stage.beside == areas and stage.as_dict()["beside"] == areas
    assert stage.total == plain.total and stage.parts == plain.parts
    assert stage.reserved == plain.reserved + sum(areas.values())


def test_where_nothing_is_pushed_there_is_no_area():
    for changes in ({"tp": 1, "sequence": False}, {"device": "cpu"}):
        run = replace(RUN, joined="pushed", **changes)
        assert not training_memory(LLAMA3_8B, run, StateDtypes()).fullest.beside


@pytest.mark.parametrize(
    ("method", "size"),
    [("pushed", PUSHED), ("auto", PUSHED + SYMMETRIC), ("chunked", 0), ("plain", 0), ("auto --fp8", 0)],
)
def test_plan_and_planner_count_them(method, size):
    words = (
        "--preset llama3-8b --seq-length 8192 --micro-batch-size 2 --tensor-model-parallel-size 2 --bf16 "
        f"--sequence-parallel --tp-comm-overlap --tp-comm-overlap-method {method} --train-iters 1"
    )
    config, hardware = parse_args(words.split()).config, hardware_named("h200", 2)
    assert hardware is not None
    assert sum(make_plan(config, hardware, 128_256, 2).memory.fullest.beside.values()) == size
    assert rank_memory(setup_of(config, 2, vocab_size=128_256)).areas == size
