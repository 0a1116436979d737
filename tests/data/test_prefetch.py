"""Reading ahead: order, exceptions, shutdown."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from redline.data.microbatch import Microbatch
from redline.data.prefetch import prefetch


class Numbered:
    """A source whose tokens are the sample numbers; it may be slow, and may fail at one sample."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.asked: list[int] = []

    def batch(self, start: int, count: int) -> Microbatch:
        self.asked.append(start)
        time.sleep(0.001 * (start % 3))  # finish out of order
        if start == self.fails_at:
            raise ValueError(f"sample {start}")
        rows = torch.arange(start, start + count)[:, None]
        return Microbatch(rows, rows, rows, rows, None, rows[:, 0])


def data_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("redline-data")]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_every_step_in_order(num_workers: int) -> None:
    plan = [(0, 2), (2, 1), (3, 4), *((7 + k, 1) for k in range(20))]
    with prefetch(Numbered(), plan, num_workers=num_workers) as batches:
        got = [(int(b.sample_index_B[0]), len(b.sample_index_B)) for b in batches]
    assert got == plan
    assert data_threads() == []


def test_an_endless_plan_is_read_a_little_ahead() -> None:
    source = Numbered()
    with prefetch(source, ((k, 1) for k in itertools.count()), num_workers=2, depth=4) as batches:
        for expected in range(10):
            assert int(next(batches).sample_index_B[0]) == expected
    assert max(source.asked) < 10 + 4
    assert data_threads() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_comes_at_its_step_and_ends_the_threads(num_workers: int) -> None:
    batches = prefetch(Numbered(fails_at=5), [(k, 1) for k in range(100)], num_workers=num_workers)
    assert [int(next(batches).sample_index_B[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="sample 5"):
        next(batches)
    assert data_threads() == []


def test_an_exception_of_the_plan_is_raised_too() -> None:
    def plan() -> Iterator[tuple[int, int]]:
        yield (0, 1)
        raise RuntimeError("no such step")

    batches = prefetch(Numbered(), plan(), num_workers=2)
    next(batches)
    with pytest.raises(RuntimeError, match="no such step"):
        next(batches)


def test_leaving_early_stops_everything() -> None:
    source = Numbered()
    batches = prefetch(source, ((k, 1) for k in itertools.count()), num_workers=3)
    with pytest.raises(KeyboardInterrupt), batches:
        next(batches)
        raise KeyboardInterrupt
    asked = len(source.asked)
    assert data_threads() == []
    time.sleep(0.02)
    assert len(source.asked) == asked
    with pytest.raises(StopIteration):
        next(batches)
