"""Scale + mask + softmax in Triton: a program takes whole rows, and skips what causality or padding hides.

Backward needs the result only: where a position was masked it is 0, and so is its gradient.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import (
    TileConfig,
    as_rows,
    ceil_div,
    contiguous_like,
    next_power_of_2,
    on_device_of,
)
from redline.kernels.launch import launchable
from redline.kernels.triton_common import LOG2_E


@functools.cache
def row_config(cols: int) -> TileConfig:
    """Whole rows, 32 elements a thread (64 above 16384 columns): a row has costs beside its elements."""
    block_cols = next_power_of_2(cols)
    warps = min(16, max(2, block_cols // 1024))
    return TileConfig(max(1, 2048 // block_cols), block_cols, warps)


@launchable
@triton.jit
def _masked_softmax_fwd_kernel(
    x_ptr, y_ptr, mask_ptr, lengths_ptr, rows, cols, x_stride, scale, heads, queries,
    mask_b, mask_n, mask_s, mask_k,
    CAUSAL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    narrow = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # fewer than 2^31 rows
    row, query, batch = narrow.to(tl.int64), narrow % queries, narrow // queries // heads
    col = tl.arange(0, BLOCK_COLS)[None, :]
    limit = tl.where(row < rows, cols, 0)  # of what causality and padding leave: one comparison an element
    if CAUSAL:
        limit = tl.minimum(limit, query + 1 + cols - queries)
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + batch, mask=row < rows, other=0).to(tl.int64)
        limit = tl.minimum(limit, tl.minimum(length, cols).to(tl.int32))
    limit = limit[:, None]
    valid = col < limit
    read = col // 16 * 16 < limit  # in whole groups of 16, so that reads stay 16 bytes wide
    if mask_ptr is not None:
        head = narrow // queries % heads
        first = batch.to(tl.int64) * mask_b + head.to(tl.int64) * mask_n + query.to(tl.int64) * mask_s
        offset = first[:, None] + col.to(tl.int64) * mask_k
        valid &= tl.load(mask_ptr + offset, mask=valid, other=1) == 0
    read &= col < cols
    x = tl.load(x_ptr + (row * x_stride)[:, None] + col, mask=read).to(tl.float32)
    x = tl.where(valid, x * scale, float("-inf"))
    peak = tl.max(x, axis=1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row with nothing left: exp(-inf - 0) is 0
    weight = tl.exp2((x - peak[:, None]) * LOG2_E)
    total = tl.sum(weight, axis=1)
    y = weight * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(
        y_ptr + (row * cols)[:, None] + col,
        y.to(y_ptr.dtype.element_ty),
        mask=(row < rows)[:, None] & (col < cols),
    )


@launchable
@triton.jit
def _masked_softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, cols, dy_stride, scale, queries,
    CAUSAL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    narrow = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = narrow.to(tl.int64)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < rows)[:, None] & (col < cols)
    read = inside
    if CAUSAL:
        read &= col // 16 * 16 <= (narrow % queries)[:, None] + (cols - queries)
    y = tl.load(y_ptr + (row * cols)[:, None] + col, mask=read, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + (row * dy_stride)[:, None] + col, mask=read, other=0.0).to(tl.float32)
    along = tl.sum(y * dy, axis=1)[:, None]
    dx = scale * y * (dy - along)
    tl.store(dx_ptr + (row * cols)[:, None] + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def forward(x: Tensor, scale: float, causal: bool, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """x [B, N, S, K] -> y, contiguous. The mask is expanded to x's shape: stride 0 where it repeats."""
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    _, heads, queries, cols = x.shape
    x_rows, config = as_rows(x), row_config(cols)
    strides = (0, 0, 0, 0) if mask is None else mask.expand(x.shape).stride()
    with on_device_of(x):
        _masked_softmax_fwd_kernel[(ceil_div(x_rows.shape[0], config.block_rows),)](
            x_rows, y, mask, lengths, x_rows.shape[0], cols, x_rows.stride(0), scale, heads, queries,
            *strides, causal, config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return y


def backward(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """dx [B, N, S, K] from dy of any strides and y contiguous."""
    dx = contiguous_like(y)
    if y.numel() == 0:
        return dx
    queries, cols = y.shape[2:]
    dy_rows, config = as_rows(dy), row_config(cols)
    with on_device_of(y):
        _masked_softmax_bwd_kernel[(ceil_div(dy_rows.shape[0], config.block_rows),)](
            dy_rows, y, dx, dy_rows.shape[0], cols, dy_rows.stride(0), scale, queries,
            causal, config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return dx
