"""GEMMs joined to collectives by writing into each other's memory: copy engines carry, not multiprocessors.

Every rank has an area that all ranks of its group may write. Rows go to their peers by copies on a stream of
its own while the own rows are multiplied; then all ranks meet once, and what has come is used where it lies:

    gather_gemm    push the own rows to all | multiply them | meet | multiply the others' rows
    gemm_scatter   multiply each peer's rows and push them | multiply the own rows | meet | add what came

An area is used in four turns, so that no rank writes where another may still read. No more than two
operations are begun and not ended, so whoever begins the n-th has met its peers n - 2 times; what the
(n - 4)th brought them must be read by then: before the second meeting after its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from redline.comm.collectives import Pending, check_even
from redline.comm.groups import Group
from redline.comm.transport import Work
from redline.formulas.tp_traffic import TURNS


class PeerMemory(Protocol):
    """An area of bytes on each rank of a group that all of them may write."""

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The bytes of that rank's area from `start` on, as a tensor of this device."""

    def beside(self) -> AbstractContextManager[object]:
        """Within, work is queued beside the current stream, behind what that holds by now."""

    def mark(self) -> Work:
        """What is queued beside up to now; its `wait` makes the current stream wait for it."""

    def meet(self) -> None:
        """The current stream waits until every rank's has come here."""


class Pushed:
    """The provider over one group's memory; one object serves all GEMMs of it.

    What `gather_gemm` and `gather` return lies in the area: it holds until the second operation after has
    ended.

    Args:
        num_bytes: of the largest whole tensor that is gathered or scattered; the area is TURNS times that.
    """

    name = "pushed"

    def __init__(self, memory: PeerMemory, num_bytes: int) -> None:
        self._memory, self._num_bytes, self._turn = memory, num_bytes, 0

    def gather_gemm(self, x_shard: Tensor, w: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """See LinkedGemm."""
        rows, own = x_shard.shape[0], group.index
        y = x_shard.new_empty(group.size * rows, w.shape[1])
        gathering = self.gather(x_shard, group)
        torch.mm(x_shard, w, out=y[own * rows : (own + 1) * rows])
        x = gathering.wait()
        for others in (slice(0, own * rows), slice((own + 1) * rows, None)):
            if len(x[others]):
                torch.mm(x[others], w, out=y[others])
        return y, x

    def gemm_scatter(self, x: Tensor, w: Tensor, group: Group) -> Tensor:
        """See LinkedGemm."""
        check_even(x, group)
        own, size = group.index, group.size
        group.sends("reduce-scatter with GEMM")
        parts, turn = x.view(size, x.shape[0] // size, -1), self._next_turn()
        products = []  # kept until they have arrived
        for peer in _others(group):
            products.append(parts[peer] @ w)
            self._push({peer: products[-1]}, own, turn)
        arriving = self._memory.mark()
        y = parts[own] @ w
        self._receive(arriving, y, y, group, turn)
        return y

    def gather(self, x_shard: Tensor, group: Group) -> Pending:
        """See LinkedGemm."""
        group.sends("all-gather")
        turn, shape = self._next_turn(), (group.size * x_shard.shape[0], *x_shard.shape[1:])
        self._push(dict.fromkeys((*_others(group), group.index), x_shard), group.index, turn)
        x = self._memory.view(group.index, self._start(turn), shape, x_shard.dtype)
        arriving = self._memory.mark()

        def meet() -> None:
            arriving.wait()
            self._memory.meet()

        return Pending(x, (_Once(meet),))

    def scatter(self, x: Tensor, group: Group) -> Pending:
        """See LinkedGemm."""
        check_even(x, group)
        group.sends("reduce-scatter")
        parts, turn = x.view(group.size, x.shape[0] // group.size, *x.shape[1:]), self._next_turn()
        self._push({peer: parts[peer] for peer in _others(group)}, group.index, turn)
        arriving, y = self._memory.mark(), torch.empty_like(parts[group.index])
        return Pending(y, (_Once(lambda: self._receive(arriving, parts[group.index], y, group, turn)),))

    def _next_turn(self) -> int:
        self._turn = (self._turn + 1) % TURNS
        return self._turn

    def _start(self, turn: int) -> int:
        return turn * self._num_bytes

    def _push(self, parts: dict[int, Tensor], index: int, turn: int) -> None:
        """Write each part into the area of its rank, as the part of that number."""
        with self._memory.beside():
            for rank, part in parts.items():
                assert (index + 1) * part.nbytes <= self._num_bytes, "a turn is as long as the largest tensor"
                start = self._start(turn) + index * part.nbytes
                self._memory.view(rank, start, tuple(part.shape), part.dtype).copy_(part)

    def _receive(self, arriving: Work, own: Tensor, y: Tensor, group: Group, turn: int) -> None:
        """y = own + what the others have pushed here."""
        arriving.wait()
        self._memory.meet()
        for rank in _others(group):
            start = self._start(turn) + rank * own.nbytes
            torch.add(own, self._memory.view(group.index, start, tuple(own.shape), own.dtype), out=y)
            own = y


class _Once:
    """Work that is waited for any number of times, and done at the first."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def wait(self) -> None:
        """Do it, unless it is done."""
        if self._work is not None:
            self._work()
        self._work = None


def _others(group: Group) -> list[int]:
    """The other ranks' places along the axis, the next one first: no two ranks begin with the same."""
    return [(group.index + step) % group.size for step in range(1, group.size)]
