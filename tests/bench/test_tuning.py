"""The launch choices that `benchmarks/tune_kernels.py` tries are written in the rooms under these names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_case import norm_case

from redline.bench import kernels as bench_kernels
from redline.bench.rooms import rooms
from redline.bench.turns import Turns


@pytest.fixture
def tuning(kernel_device):
    path = Path(__file__).parents[2] / "benchmarks" / "tune_kernels.py"
    spec = importlib.util.spec_from_file_location("tune_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_choices_are_tried_one_by_one_and_put_back(tuning):
    """A name that a room no longer has would be measured as if nothing had been changed."""
    seen = set()
    for op, what, module, values in tuning.choices():
        assert op in rooms() and (op, what) not in seen
        seen.add((op, what))
        room = importlib.import_module(tuning.ROOMS + module)
        written = {name: getattr(room, name) for name in values}  # fails where there is no such name
        with tuning.replaced(module, values):
            assert {name: getattr(room, name) for name in values} == values
        assert {name: getattr(room, name) for name in values} == written
        source = inspect.getsource(room)
        assert all(source.count(name) > 1 for name in values), "written, and never read"
    assert {"rms_norm", "rotary", "embedding"} <= {op for op, _ in seen}


def test_choices_are_put_back_after_an_error(tuning):
    room = importlib.import_module("redline.kernels.embedding.kernel")
    rows = room.RUN_ROWS
    with pytest.raises(RuntimeError), tuning.replaced("embedding.kernel", {"RUN_ROWS": 64}):
        assert room.RUN_ROWS == 64
        raise RuntimeError("a configuration that the card does not hold")
    assert rows == room.RUN_ROWS


def test_choices_take_turns_and_one_that_fails_says_so(tuning, monkeypatch):
    """Without a clock: each is called as often as it should be, under its own values."""
    seen = []

    def take_turns(calls, rounds, clock):
        for call in calls.values():
            call()
        return {name: Turns(valid_s=[2e-6, 2e-6]) for name in calls}

    def fused(x, weight):
        seen.append(room.RUN_ROWS)
        if room.RUN_ROWS == 64:
            raise RuntimeError("out of shared memory")
        return x * weight

    room = importlib.import_module("redline.kernels.embedding.kernel")
    monkeypatch.setattr(tuning, "take_turns", take_turns)
    monkeypatch.setattr(tuning, "CudaClock", lambda device: None)
    monkeypatch.setattr(bench_kernels, "GIB", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    case = replace(norm_case(fused), bytes_backward=1)
    others = [("rms_norm", f"{rows} rows", "embedding.kernel", {"RUN_ROWS": rows}) for rows in (64, 5)]
    written, failed, other = tuning.in_turns(case, torch.device("cpu"), others)
    assert seen == [room.RUN_ROWS] * 3 + [64] + [5] * 3 + [room.RUN_ROWS, 5] * 2
    assert failed["error"] == "RuntimeError: out of shared memory" and "forward_us" not in failed
    assert written["what"] == "as written" and other["what"] == "5 rows"
    for row in (written, other):
        assert (
            row["forward_us"] == row["both_us"] == row["both_copy_us"] == 2.0 and row["both_error_us"] == 0.0
        )
