"""The GEMMs of tensor parallelism: gemm.py's, with what travels before, behind and beside them.

                       forward                        backward
    column             y = x W^T                      all-reduce of dx, behind the wgrad GEMM
      with sequence    y = gather(x) W^T              gather of x behind the dgrad GEMM, reduce-scatter of dx
                                                      behind the wgrad GEMM
    row                y = all-reduce(x W^T)          dx = dy W
      with sequence    y = reduce-scatter(x W^T)      dx = gather(dy) W

A column GEMM saves its own rows of x, not the gathered ones. A row GEMM has no bias: it would be added once a
rank; who comes next adds it (`Linear`'s `defer_bias`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.comm.collectives import (
    Pending,
    Reduction,
    all_gather,
    all_reduce,
    all_reduce_async,
)
from redline.kernels.cross_entropy import VocabShard
from redline.model.gemm import parameter_grads
from redline.model.main_grad import main_grad_of
from redline.model.ops import Ops
from redline.model.tensor_parallel import TensorParallel


class ColumnGemmFn(torch.autograd.Function):
    """This rank's output features of x W^T + b. Saves x as it is held between GEMMs, and W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        weight_main_grad: Tensor | None,
        bias_main_grad: Tensor | None,
        fuse_wgrad: bool,
        tp: TensorParallel,
    ) -> Tensor:
        x_TI = x.flatten(0, -2).contiguous()  # [T/tp, I] with sequence parallelism
        ctx.save_for_backward(x, weight_OI)  # x itself: a site may rebuild it (recompute.py)
        ctx.weight_main_grad, ctx.bias_main_grad = weight_main_grad, bias_main_grad
        ctx.fuse_wgrad, ctx.tp = fuse_wgrad, tp
        if tp.sequence:
            y_TO, _ = tp.gather_gemm.gather_gemm(x_TI, weight_OI.T, tp.group)
            if bias_O is not None:
                y_TO += bias_O
        else:
            y_TO = F.linear(x_TI, weight_OI, bias_O)
        return shaped(y_TO, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        x_TI, dy_TO = x.flatten(0, -2).contiguous(), dy.flatten(0, -2)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        gathers = tp.sequence and needs_weight
        gathering = tp.gather_gemm.gather(x_TI, tp.group) if gathers else Pending(x_TI)
        if not tp.bulk_wgrad:
            gathering.wait()
        sending = _send_input_grad(dy_TO, weight_OI, tp) if needs_x else None
        if sending is not None and not tp.bulk_dgrad:
            sending.wait()
        weight_grad, bias_grad = parameter_grads(ctx, dy_TO, gathering.wait())
        dx = None if sending is None else sending.wait().view(x.shape)
        return dx, weight_grad, bias_grad, None, None, None, None


def _send_input_grad(dy_TO: Tensor, weight_OI: Tensor, tp: TensorParallel) -> Pending:
    """The gradient of a column GEMM's input, on its way to the ranks that hold its rows."""
    if tp.sequence and tp.scatter_dgrad:
        return Pending(tp.gemm_scatter.gemm_scatter(dy_TO.contiguous(), weight_OI, tp.group))
    dx_TI = dy_TO @ weight_OI
    return tp.gemm_scatter.scatter(dx_TI, tp.group) if tp.sequence else all_reduce_async(dx_TI, tp.group)


class RowGemmFn(torch.autograd.Function):
    """x W^T summed over the ranks' input features. Saves x and W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: None,
        weight_main_grad: Tensor | None,
        bias_main_grad: None,
        fuse_wgrad: bool,
        tp: TensorParallel,
    ) -> Tensor:
        x_TI = x.flatten(0, -2).contiguous()
        ctx.save_for_backward(x, weight_OI)
        ctx.weight_main_grad, ctx.bias_main_grad = weight_main_grad, bias_main_grad
        ctx.fuse_wgrad, ctx.tp = fuse_wgrad, tp
        if tp.sequence:
            return shaped(tp.gemm_scatter.gemm_scatter(x_TI, weight_OI.T, tp.group), x)
        return shaped(all_reduce(x_TI @ weight_OI.T, tp.group), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        x_TI, dy_TO, dx_TI = x.flatten(0, -2), dy.flatten(0, -2), None
        if tp.sequence and ctx.needs_input_grad[0]:
            dx_TI, dy_TO = tp.gather_gemm.gather_gemm(dy_TO.contiguous(), weight_OI, tp.group)
        elif tp.sequence:
            dy_TO = all_gather(dy_TO, tp.group)
        elif ctx.needs_input_grad[0]:
            dx_TI = dy_TO @ weight_OI
        weight_grad, _ = parameter_grads(ctx, dy_TO, x_TI)
        dx = None if dx_TI is None else dx_TI.view(x.shape)
        return dx, weight_grad, None, None, None, None, None


def shaped(y_TO: Tensor, x: Tensor) -> Tensor:
    """Rows of y as those of x, be there more or fewer: [T', O] -> [S', B, O] for an x [S, B, I]."""
    inner = x.shape[1:-1]
    shape = (y_TO.shape[0] // math.prod(inner), *inner, y_TO.shape[1])
    y: Tensor = torch.ops.aten._unsafe_view(y_TO, shape)  # no view for autograd, as in gemm.py
    return y


def column_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, fuse_wgrad: bool, tp: TensorParallel
) -> Tensor:
    """gemm.linear for a matrix of which each rank holds some output features.

    Shapes: [S, B, I] ([S/tp, B, I] with sequence parallelism), [O/tp, I], [O/tp] -> [S, B, O/tp].
    """
    main_grads = main_grad_of(weight_OI), main_grad_of(bias_O)
    y: Tensor = ColumnGemmFn.apply(x, weight_OI, bias_O, *main_grads, fuse_wgrad, tp)
    return y


def row_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, fuse_wgrad: bool, tp: TensorParallel
) -> Tensor:
    """gemm.linear for a matrix of which each rank holds some input features, without a bias.

    Shapes: [S, B, I/tp], [O, I/tp] -> [S, B, O] ([S/tp, B, O] with sequence parallelism).
    """
    assert bias_O is None, "the bias of a row-split matrix is added after the sum"
    y: Tensor = RowGemmFn.apply(x, weight_OI, None, main_grad_of(weight_OI), None, fuse_wgrad, tp)
    return y


def embedding(
    tokens: Tensor,
    weight_VH: Tensor,
    positions: Tensor | None,
    position_weight_PH: Tensor | None,
    *,
    words: Callable[..., Tensor],
    tp: TensorParallel,
) -> Tensor:
    """local.embedding with the vocabulary's rows spread over the ranks: each looks up its own, then the sum.

    Shapes: int64 [S, B] twice -> [S, B, H] ([S/tp, B, H] with sequence parallelism).

    Args:
        words: looks up in one rank's rows. Learned positions are added after the sum, to the rows held here.
    """
    rows = len(weight_VH)
    share = {"vocab_start": tp.index * rows, "vocab_size": tp.size * rows}
    x = tp.leave(words(tokens, weight_VH, None, None, **share))
    if positions is None or position_weight_PH is None:
        return x
    return x + words(tp.own_rows(positions), position_weight_PH, None, None)


def head_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    *tokens: Tensor,
    loss: Callable[..., Tensor],
    tp: TensorParallel,
    **how: Any,
) -> Tensor:
    """local.head_loss with the vocabulary's rows spread over the ranks; the same loss on each of them."""

    def reduce(x: Tensor, reduction: Reduction) -> Tensor:
        return all_reduce(x, tp.group, reduction)

    rows = len(weight_VH)
    shard = VocabShard(tp.index * rows, rows, reduce)
    return loss(tp.enter(hidden_TH), weight_VH, *tokens, shard=shard, **how)


def tensor_parallel_ops(ops: Ops, tp: TensorParallel, *, fuse_wgrad: bool = True) -> Ops:
    """`ops` on one of several tensor-parallel ranks; as they are on one."""
    if tp.size == 1:
        return ops
    return replace(
        ops,
        linear=partial(column_linear, fuse_wgrad=fuse_wgrad, tp=tp),
        row_linear=partial(row_linear, fuse_wgrad=fuse_wgrad, tp=tp),
        embedding=partial(embedding, words=ops.embedding, tp=tp),
        head_loss=partial(head_loss, loss=ops.head_loss, tp=tp),
    )
