"""Rows pushed into each other's memory: threads as ranks, late at random, get what plain collectives give.

And, over a link of fixed speed, they travel while products are computed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from redline.comm import Done, Group, linked_gemm, pushed
from redline.comm.linked_gemm import Plain
from redline.comm.pushed import TURNS, Pushed
from redline.errors import ShapeError

sys.path.insert(0, str(Path(__file__).parent))

from link import Interval, Link, Waited, hidden

ROWS, K, N = 4, 6, 5


class Threads:
    """An area of each thread, which all of them write; whoever comes is late at times."""

    def __init__(self, size: int, num_bytes: int, delay_s: float) -> None:
        self.areas = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(size)]
        self.barrier, self.delay_s = threading.Barrier(size, timeout=20), delay_s

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        time.sleep(random.random() * self.delay_s)
        length = torch.Size(shape).numel() * dtype.itemsize
        return self.areas[rank][start : start + length].view(dtype).view(shape)

    def beside(self) -> nullcontext[None]:
        return nullcontext()

    def mark(self) -> Done:
        return Done()

    def meet(self) -> None:
        self.barrier.wait()


def on_threads(size: int, work: Callable[[Pushed, Group], object], delay_s: float = 0.0) -> list[object]:
    num_bytes = size * ROWS * max(K, N) * 8
    memory, found = Threads(size, pushed.TURNS * num_bytes, delay_s), [None] * size

    def run(index: int) -> None:
        try:
            found[index] = work(Pushed(memory, num_bytes), Group(tuple(range(size)), index))
        except BaseException:
            memory.barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size)[group.index].contiguous()


def layer(provider: Pushed, group: Group, seed: int) -> bool:
    """The order of a block's backward: a gather and a scatter under way at once, then the joined ones."""
    size = group.size
    x, w = values(size * ROWS, K, seed=seed), values(K, N, seed=seed + 1)
    terms = [values(size * ROWS, N, seed=seed + 2 + rank) for rank in range(size)]
    total = part(torch.stack(terms).sum(0), group)
    gathering = provider.gather(part(x, group), group)
    scattering = provider.scatter(terms[group.index], group)
    same = [torch.equal(gathering.wait(), x)]
    whole = gathering.wait()
    same.append(torch.equal(whole, x))
    same.append(torch.allclose(scattering.wait(), total) and torch.allclose(scattering.wait(), total))
    y, gathered = provider.gather_gemm(part(x, group), w, group)
    same.append(torch.allclose(y, x @ w) and torch.equal(gathered, x))
    own = [values(size * ROWS, K, seed=seed + 9 + rank) for rank in range(size)]
    summed = part(torch.stack([each @ w for each in own]).sum(0), group)
    same.append(torch.allclose(provider.gemm_scatter(own[group.index], w, group), summed))
    return all(same) and torch.equal(gathered, x)  # which holds one operation more


@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_gives_what_collectives_give(size: int) -> None:
    found = on_threads(size, lambda provider, group: layer(provider, group, seed=size))
    assert found == [True] * size


def test_late_ranks_never_write_where_another_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty layers; with a single turn of the area the same ranks overrun each other."""

    def layers(provider: Pushed, group: Group) -> bool:
        same = [layer(provider, group, seed) for seed in range(0, 400, 20)]
        return all(same)

    assert on_threads(2, layers, delay_s=2e-3) == [True] * 2
    monkeypatch.setattr(pushed, "TURNS", 1)
    assert TURNS == 4 and on_threads(2, layers, delay_s=2e-3) != [True] * 2


def test_rows_that_do_not_divide_are_refused() -> None:
    provider, pair = Pushed(Threads(1, 8, 0.0), 8), Group((0, 1))
    with pytest.raises(ShapeError):
        provider.gemm_scatter(torch.ones(3, 2), torch.ones(2, 2), pair)
    with pytest.raises(ShapeError):
        provider.scatter(torch.ones(3, 2), pair)


# Overlap, measured on a link of fixed speed: the other rank is imagined to hold the same and to be as fast.

ROW_S, PUSH_S = 0.005, 0.03  # multiplying a row, and pushing a rank's rows; of 8 rows
LONG = 8
PAIR = Group((0, 1))


class Linked:
    """The areas of two ranks; what is pushed to the other travels, and as much comes from it meanwhile."""

    def __init__(self, num_bytes: int, rows_bytes: int) -> None:
        self.area = torch.zeros(num_bytes, dtype=torch.uint8)
        self.link, self.pushing = Link(rows_bytes / PUSH_S), False
        self.last: Waited | Done = Done()

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if self.pushing:
            return mock.Mock(copy_=partial(self._push, rank, start))
        length = torch.Size(shape).numel() * dtype.itemsize
        return self.area[start : start + length].view(dtype).view(shape)

    def _push(self, rank: int, start: int, part: Tensor) -> None:
        here = start if rank == 0 else start + part.nbytes  # the other's rows come where the other's place is
        arriving = self.area[here : here + part.nbytes].view(part.dtype).view(part.shape)
        if rank == 0:
            arriving.copy_(part)
        else:
            self.last = self.link.send(part.nbytes, lambda: arriving.copy_(part))

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.pushing = True
        yield
        self.pushing = False

    def mark(self) -> Waited | Done:
        return self.last

    def meet(self) -> None:
        """The other one is as fast."""


class Slow(Tensor):
    """A weight whose products take a while, and note when."""

    computed: ClassVar[list[Interval]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        plain = [each.as_subclass(Tensor) if isinstance(each, Slow) else each for each in args]
        found = func(*plain, **(kwargs or {}))
        if func in (torch.mm, Tensor.matmul, Tensor.__matmul__):
            time.sleep(len(args[0]) * ROW_S)
            cls.computed.append((start, time.perf_counter()))
        return found


def hidden_by(work: Callable[[Pushed, Tensor, Tensor], object], memory: type[Linked] = Linked) -> list[float]:
    """Seconds of pushing behind products, of three tries."""
    x, w = values(LONG, K, seed=1), values(K, K, seed=2).as_subclass(Slow)
    turn, found = 2 * x.nbytes, []
    for _ in range(3):
        Slow.computed.clear()
        area = memory(TURNS * turn, x.nbytes)
        work(Pushed(area, turn), x, w)
        found.append(hidden(Slow.computed, area.link.intervals))
    return found


def gathered(provider: Pushed, x: Tensor, w: Tensor) -> None:
    y, whole = provider.gather_gemm(x, w, PAIR)
    assert torch.equal(whole, torch.cat((x, x)))
    torch.testing.assert_close(y, whole @ w.as_subclass(Tensor))


def scattered(provider: Pushed, x: Tensor, w: Tensor) -> None:
    y = provider.gemm_scatter(torch.cat((x, x)), w, PAIR)
    torch.testing.assert_close(y, 2 * x @ w.as_subclass(Tensor))


def behind_another(provider: Pushed, x: Tensor, w: Tensor) -> None:
    """As backward does: both under way at once, each behind a product of its own."""
    gathering = provider.gather(x, PAIR)
    x @ w
    scattering = provider.scatter(torch.cat((x, x)), PAIR)
    x @ w
    torch.testing.assert_close(scattering.wait(), 2 * x)
    assert torch.equal(gathering.wait(), torch.cat((x, x)))


class InTheOpen(Linked):
    """Whoever pushes waits for it."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        with super().beside():
            yield
        self.last.wait()


@pytest.mark.parametrize(("work", "pushes"), [(gathered, 1), (scattered, 1), (behind_another, 2)])
def test_pushes_hide_nine_tenths_of_what_their_order_allows(work: Any, pushes: int) -> None:
    """By intervals: products of a rank's own rows outlast a push, so that all of it may hide.

    The best of the tries counts: a busy machine only delays.
    """
    assert LONG * ROW_S > PUSH_S
    assert max(hidden_by(work)) >= 0.9 * pushes * PUSH_S
    assert min(hidden_by(work, InTheOpen)) == 0.0


def test_without_the_method_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain order on the same link."""
    x, w = values(LONG, K, seed=1), values(K, K, seed=2).as_subclass(Slow)
    link = Link(x.nbytes / PUSH_S)

    def over(x: Tensor, _: Group, result: Callable[[Tensor], Tensor]) -> Tensor:
        link.send(x.nbytes).wait()
        return result(x)

    monkeypatch.setattr(linked_gemm, "all_gather", partial(over, result=lambda x: torch.cat((x, x))))
    monkeypatch.setattr(linked_gemm, "reduce_scatter", partial(over, result=lambda x: 2 * x.chunk(2)[0]))
    Slow.computed.clear()
    Plain().gather_gemm(x, w, PAIR)
    Plain().gemm_scatter(torch.cat((x, x)), w, PAIR)
    assert len(Slow.computed) == len(link.intervals) == 2
    assert hidden(Slow.computed, link.intervals) == 0.0
