"""Rows pushed into each other's memory: threads as ranks, late at random, get what plain collectives give."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from redline.comm import Done, Group, pushed
from redline.comm.pushed import TURNS, Pushed
from redline.errors import ShapeError

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
