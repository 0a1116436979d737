"""Collectives as functions with gradients: each does forward what its pair does backward.

On an axis of size 1 each is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.comm.collectives import all_gather, all_reduce, reduce_scatter
from redline.comm.groups import Group


class _CopyFn(torch.autograd.Function):
    """The identity; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy.clone(memory_format=torch.contiguous_format), ctx.group), None


class _SumFn(torch.autograd.Function):
    """The sum over the ranks; the gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherFn(torch.autograd.Function):
    """All ranks' rows; gradients are summed, and each rank keeps those of its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.group), None


class _ScatterFn(torch.autograd.Function):
    """The sum over the ranks, cut into rows; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.group), None


def _applied(function: Any, x: Tensor, group: Group) -> Tensor:
    if group.size == 1:
        return x
    y: Tensor = function.apply(x, group)
    return y


def copy_to(x: Tensor, group: Group) -> Tensor:
    """`x` where every rank uses all of it: identity forward, all-reduce backward (the pair of `sum_over`)."""
    return _applied(_CopyFn, x, group)


def sum_over(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' partial results: all-reduce forward, identity backward."""
    return _applied(_SumFn, x, group)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """[R, ...] -> [size x R, ...]: all-gather forward, reduce-scatter backward (the pair of `sum_rows`).

    Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
    """
    return _applied(_GatherFn, x, group)


def sum_rows(x: Tensor, group: Group) -> Tensor:
    """[size x R, ...] -> [R, ...], summed: reduce-scatter forward, all-gather backward."""
    return _applied(_ScatterFn, x, group)
