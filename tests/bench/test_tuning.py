"""The launch choices that `benchmarks/tune_kernels.py` tries are written in the rooms under these names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

from redline.bench.rooms import rooms


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
