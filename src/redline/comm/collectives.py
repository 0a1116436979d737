"""Collectives along one axis, at once or as a handle to wait for: PyTorch's spellings, written down once.

Tensors are contiguous; "gather" and "scatter" work on dim 0. On an axis of size 1 each is the identity and
sends nothing, so callers have no case of their own for it. In a graph of torch.compile they are PyTorch's
functional operators, which the compiler knows: then an all-reduce leaves its operand as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from redline.comm.groups import Group
from redline.comm.pace import Pace
from redline.errors import ShapeError

Reduction = Literal["sum", "max"]
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Renamed in torch 2.13, where the old names warn at each call.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_operators: Any = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way. `wait` returns its result once the device may read it.

    Attributes:
        work: handles of torch.distributed.
        in_graph: whether it is a functional operator in a graph of torch.compile.
        pace: a stopwatch that the wait is no work for.
    """

    result: Tensor
    work: tuple[Any, ...] = ()
    in_graph: bool = False
    pace: Pace | None = None

    def wait(self) -> Tensor:
        """The result; on a GPU the current stream waits, not the host."""
        if self.in_graph:
            waited: Tensor = _operators.wait_tensor(self.result)
            return waited
        with nullcontext() if self.pace is None else self.pace.waiting():
            for each in self.work:
                each.wait()
        return self.result


def all_reduce_async(x: Tensor, group: Group, reduction: Reduction = "sum") -> Pending:
    """Reduce `x` in place over the ranks of `group`."""
    if group.handle is None:
        return Pending(x)
    if is_compiling():
        return Pending(_operators.all_reduce(x, reduction, group.name), in_graph=True)
    group.sends("all-reduce", x)
    work = dist.all_reduce(x, _REDUCTIONS[reduction], group=group.handle, async_op=True)
    return Pending(x, (work,), pace=group.pace)


def all_gather_async(x_shard: Tensor, group: Group) -> Pending:
    """The shards of all ranks one behind the other: [R, ...] -> [size x R, ...]."""
    if group.handle is None:
        return Pending(x_shard)
    if is_compiling():
        whole = _operators.all_gather_into_tensor(x_shard, group.size, group.name)
        return Pending(whole, in_graph=True)
    whole = x_shard.new_empty((group.size * x_shard.shape[0], *x_shard.shape[1:]))
    group.sends("all-gather", whole)
    work = _all_gather(whole, x_shard, group=group.handle, async_op=True)
    return Pending(whole, (work,), pace=group.pace)


def reduce_scatter_async(x: Tensor, group: Group) -> Pending:
    """Sum over the ranks and keep this rank's part: [size x R, ...] -> [R, ...].

    Raises: ShapeError when dim 0 cannot be cut evenly.
    """
    if group.handle is None:
        return Pending(x)
    check_even(x, group)
    if is_compiling():
        part = _operators.reduce_scatter_tensor(x, "sum", group.size, group.name)
        return Pending(part, in_graph=True)
    part = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return reduce_scatter_into_async(part, x, group)


def reduce_scatter_into_async(part: Tensor, x: Tensor, group: Group) -> Pending:
    """`reduce_scatter_async` into a tensor that is there already; the axis has more than one rank."""
    group.sends("reduce-scatter", x)
    work = _reduce_scatter(part, x, group=group.handle, async_op=True)
    return Pending(part, (work,), pace=group.pace)


def exchange_async(sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], group: Group) -> Any:
    """Send to and receive from ranks of `group`, by their place along the axis, in one batch.

    Returns: what is waited for, one handle or several.
    """
    group.sends("exchange")
    batch = [dist.P2POp(dist.isend, x, group.ranks[to], group.handle) for to, x in sends]
    batch += [dist.P2POp(dist.irecv, x, group.ranks[at], group.handle) for at, x in receives]
    return tuple(dist.batch_isend_irecv(batch))


def all_reduce(x: Tensor, group: Group, reduction: Reduction = "sum") -> Tensor:
    """`x`, reduced in place."""
    return all_reduce_async(x, group, reduction).wait()


def all_gather(x_shard: Tensor, group: Group) -> Tensor:
    """See `all_gather_async`."""
    return all_gather_async(x_shard.contiguous(), group).wait()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """See `reduce_scatter_async`."""
    return reduce_scatter_async(x.contiguous(), group).wait()


def own_part(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """The view of `x` that this rank keeps when `dim` is cut into equal parts."""
    return x.chunk(group.size, dim)[group.index] if group.size > 1 else x


def check_even(x: Tensor, group: Group) -> None:
    """Raises ShapeError unless dim 0 is a multiple of the axis."""
    if x.shape[0] % group.size:
        raise ShapeError(
            f"{x.shape[0]} rows cannot be spread over {group.size} ranks.",
            "each rank holds the same number.",
            "choose a sequence length that the ranks divide.",
        )
