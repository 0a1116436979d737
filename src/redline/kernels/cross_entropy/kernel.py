"""Triton kernels of the token loss. The only file of the room that imports Triton.

Forward reads the logits once (one program a row), backward reads and writes them once (one program a
tile of a row). Rows are addressed by 64-bit offsets; no atomics: results are the same run to run.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import ceil_div, contiguous_like, next_power_of_2, on_device_of
from redline.kernels.launch import launchable
from redline.kernels.loss_spec import loss_spec
from redline.kernels.loss_triton import (
    label_logit,
    logit_gradient,
    row_statistics,
    row_tiles,
    token_and_weight,
)

FORWARD_WARPS = 8
BACKWARD_BLOCK, BACKWARD_WARPS = 4096, 8  # 16 elements a thread: few enough registers for 5 programs an SM


@launchable
@triton.jit
def _loss_kernel(
    logits_ptr, labels_ptr, weights_ptr, loss_ptr, lse_ptr, row_stride, num_columns, vocab_size,
    label_share, other_share, z_loss,
    SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label, weight = token_and_weight(labels_ptr, weights_ptr, row, WEIGHTED)
    loss = 0.0
    lse = 0.0
    if weight != 0.0:
        row_ptr = logits_ptr + row * row_stride
        peak, total, logit_sum = row_statistics(row_ptr, num_columns, vocab_size, SMOOTHED, LANES, WIDTH, "")
        lse = peak + tl.log(total)
        loss = lse - label_share * label_logit(row_ptr, label, 0, vocab_size, vocab_size)
        if SMOOTHED:
            loss -= other_share * logit_sum
        loss = (loss + z_loss * lse * lse) * weight
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@launchable
@triton.jit
def _statistics_kernel(
    logits_ptr, labels_ptr, weights_ptr, out_ptr, row_stride, num_rows, num_columns, vocab_start, num_local,
    vocab_size, SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label, weight = token_and_weight(labels_ptr, weights_ptr, row, WEIGHTED)
    peak = 0.0
    total = 0.0
    target = 0.0
    logit_sum = 0.0
    if weight != 0.0:
        row_ptr = logits_ptr + row * row_stride
        peak, total, logit_sum = row_statistics(row_ptr, num_columns, num_local, SMOOTHED, LANES, WIDTH, "")
        target = label_logit(row_ptr, label, vocab_start, num_local, vocab_size)
    tl.store(out_ptr + row, peak)
    tl.store(out_ptr + num_rows + row, total)
    tl.store(out_ptr + 2 * num_rows + row, target)
    tl.store(out_ptr + 3 * num_rows + row, logit_sum)


@launchable
@triton.jit
def _gradient_kernel(
    logits_ptr, grad_ptr, labels_ptr, weights_ptr, lse_ptr, upstream_ptr, row_stride, grad_stride,
    upstream_stride, num_columns, vocab_start, num_local, num_blocks, label_share, other_share, z_loss,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    column = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    stored = column < num_columns
    # The logits are loaded before the token is known: its scalars and they travel together.
    x = tl.load(logits_ptr + row * row_stride + column, mask=stored, other=0.0).to(tl.float32)
    label, weight = token_and_weight(labels_ptr, weights_ptr, row, WEIGHTED)
    scale = weight * tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
    lse = tl.load(lse_ptr + row)
    grad = logit_gradient(
        x, column, lse, scale, label - vocab_start, num_local, label_share, other_share, z_loss
    )
    grad = tl.where(weight != 0.0, grad, 0.0)
    tl.store(grad_ptr + row * grad_stride + column, grad.to(grad_ptr.dtype.element_ty), mask=stored)


def loss(
    logits_TV: Tensor, labels_T: Tensor, weights_T: Tensor | None,
    vocab_size: int, smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss_T, lse_T), fp32. Logits [T, >= vocab_size] of unit column stride; the rest contiguous."""
    spec = loss_spec(vocab_size, smoothing, z_loss)
    tokens, columns = logits_TV.shape
    loss_T = logits_TV.new_empty(tokens, dtype=torch.float32)
    lse_T = torch.empty_like(loss_T)
    if tokens:
        tiles = row_tiles(columns, logits_TV.dtype, FORWARD_WARPS)
        with on_device_of(logits_TV):
            _loss_kernel[(tokens,)](
                logits_TV, labels_T, weights_T, loss_T, lse_T, logits_TV.stride(0), columns, vocab_size,
                spec.label_share, spec.other_share, z_loss,
                SMOOTHED=smoothing != 0.0, WEIGHTED=weights_T is not None,
                LANES=tiles.lanes, WIDTH=tiles.width, num_warps=tiles.num_warps,
            )  # fmt: skip
    return loss_T, lse_T


def statistics(
    logits_TV: Tensor, labels_T: Tensor, weights_T: Tensor | None,
    vocab_start: int, vocab_size: int, smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    """[4, T] fp32 of one shard: max, sum of exp(x - max), label logit (0 if elsewhere), sum of logits."""
    spec = loss_spec(vocab_size, smoothing, z_loss)
    tokens, columns = logits_TV.shape
    stats_4T = logits_TV.new_empty(4, tokens, dtype=torch.float32)
    if tokens:
        tiles = row_tiles(columns, logits_TV.dtype, FORWARD_WARPS)
        with on_device_of(logits_TV):
            _statistics_kernel[(tokens,)](
                logits_TV, labels_T, weights_T, stats_4T, logits_TV.stride(0), tokens, columns,
                vocab_start, spec.columns_of(vocab_start, columns), vocab_size,
                SMOOTHED=smoothing != 0.0, WEIGHTED=weights_T is not None,
                LANES=tiles.lanes, WIDTH=tiles.width, num_warps=tiles.num_warps,
            )  # fmt: skip
    return stats_4T


def gradient(logits_TV: Tensor, *rest: Any) -> Tensor:
    """The gradient of the logits in a new tensor; arguments as of `gradient_`."""
    grad_TV = contiguous_like(logits_TV)
    _write_gradient(logits_TV, grad_TV, *rest)
    return grad_TV


def gradient_(logits_TV: Tensor, *rest: Any) -> None:
    """Overwrite the logits by their gradient.

    `rest` is labels_T, weights_T or None, lse_T, upstream_T, vocab_start, vocab_size, smoothing, z_loss.
    """
    _write_gradient(logits_TV, logits_TV, *rest)


def _write_gradient(
    logits_TV: Tensor, grad_TV: Tensor, labels_T: Tensor, weights_T: Tensor | None, lse_T: Tensor,
    upstream_T: Tensor, vocab_start: int, vocab_size: int, smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    spec = loss_spec(vocab_size, smoothing, z_loss)
    tokens, columns = logits_TV.shape
    if tokens == 0:
        return
    block = min(BACKWARD_BLOCK, next_power_of_2(columns))
    blocks = ceil_div(columns, block)
    with on_device_of(logits_TV):
        _gradient_kernel[(tokens * blocks,)](
            logits_TV, grad_TV, labels_T, weights_T, lse_T, upstream_T,
            logits_TV.stride(0), grad_TV.stride(0), upstream_T.stride(0),
            columns, vocab_start, spec.columns_of(vocab_start, columns), blocks,
            spec.label_share, spec.other_share, z_loss,
            WEIGHTED=weights_T is not None, BLOCK=block, num_warps=max(1, min(BACKWARD_WARPS, block // 512)),
        )  # fmt: skip
