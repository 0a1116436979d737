"""Bias + dropout + residual in Triton: one pass forward, one backward; the mask is recomputed, never stored.

A row is one (s, b); the counter of an element is its place in its whole sample, so the mask is the same
however the sample is cut. Where H is a multiple of 4, one Philox call gives the words of 4 neighbours;
elsewhere each element draws its own block and picks its word.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import as_rows, ceil_div, contiguous_like, num_sms, on_device_of, tile_config
from redline.kernels.launch import launchable
from redline.kernels.triton_common import Sum, column_sums, philox_words
from redline.rng import keep_threshold

# Of a backward that sums. 7 programs of 4 warps and 72 registers are resident at once; 10 are faster (194 us
# against 199 on an H200, as are 14): the last strips then start at different times.
PROGRAMS_PER_SM = 10


@triton.jit
def _draw_of(key_ptr, iteration_ptr):
    """What all draws of a launch share: the two key words and the iteration, scalars in memory."""
    k0, k1 = tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32)
    return k0, k1, tl.load(iteration_ptr).to(tl.uint32)


@triton.jit
def _keep(
    k0, k1, iteration, sample_ptr, positions_ptr, row, first_col, batch, cols, rows, threshold,
    QUADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Which elements of the tile at rows `row`, columns from `first_col` survive."""
    narrow = row.to(tl.int32)  # there are fewer than 2^31 rows, and a 64-bit division is slow
    s, b = narrow // batch, narrow % batch
    sample = tl.load(sample_ptr + b)[:, None]
    position = s.to(tl.int64)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + s, mask=row < rows, other=0)
    if QUADS:
        quad = first_col // 4 + tl.arange(0, BLOCK_COLS // 4)
        block = (position * (cols // 4))[:, None] + quad[None, :]
        w0, w1, w2, w3 = philox_words(k0, k1, iteration, sample, block)
        bits = (w0 >= threshold).to(tl.int32) | ((w1 >= threshold).to(tl.int32) << 1)
        bits |= ((w2 >= threshold).to(tl.int32) << 2) | ((w3 >= threshold).to(tl.int32) << 3)
        spread = (bits[:, :, None] >> tl.arange(0, 4)[None, None, :]) & 1
        keep = tl.reshape(spread, [BLOCK_ROWS, BLOCK_COLS]) != 0
    else:
        element = (position * cols)[:, None] + (first_col + tl.arange(0, BLOCK_COLS))[None, :]
        w0, w1, w2, w3 = philox_words(k0, k1, iteration, sample, element >> 2)
        index = element & 3
        word = tl.where(index < 2, tl.where(index == 0, w0, w1), tl.where(index == 2, w2, w3))
        keep = word >= threshold
    return keep


@launchable
@triton.jit
def _bias_dropout_add_fwd_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, key_ptr, iteration_ptr, sample_ptr, positions_ptr,
    rows, cols, x_stride, residual_stride, batch, threshold, scale,
    DROP: tl.constexpr, QUADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(cols, BLOCK_COLS)
    first_col = (tl.program_id(0) % strips) * BLOCK_COLS
    row = (tl.program_id(0) // strips).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = first_col + tl.arange(0, BLOCK_COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + (row * residual_stride)[:, None] + col[None, :], mask=mask, other=0.0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    if DROP:
        k0, k1, iteration = _draw_of(key_ptr, iteration_ptr)
        keep = _keep(
            k0, k1, iteration, sample_ptr, positions_ptr, row, first_col, batch, cols, rows, threshold,
            QUADS, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        x = tl.where(keep, x * scale, 0.0)
    y = (x + residual.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (row * cols)[:, None] + col[None, :], y, mask=mask)


@launchable
@triton.jit
def _bias_dropout_add_bwd_kernel(
    dy_ptr, dx_ptr, partial_ptr, key_ptr, iteration_ptr, sample_ptr, positions_ptr,
    rows, cols, dy_stride, batch, threshold, scale, splits,
    DROP: tl.constexpr, QUADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(cols, BLOCK_COLS)
    split = tl.program_id(0) // strips
    first_col = (tl.program_id(0) % strips) * BLOCK_COLS
    col = first_col + tl.arange(0, BLOCK_COLS)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    if DROP:
        k0, k1, iteration = _draw_of(key_ptr, iteration_ptr)
    row = split * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    next_dy = tl.load(dy_ptr + (row * dy_stride)[:, None] + col[None, :], mask=mask, other=0.0)
    for _ in range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
        # The next rows are on their way while this mask is drawn.
        dx = next_dy.to(tl.float32)
        ahead = row + splits * BLOCK_ROWS
        mask = (ahead < rows)[:, None] & (col < cols)[None, :]
        next_dy = tl.load(dy_ptr + (ahead * dy_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        if DROP:
            keep = _keep(
                k0, k1, iteration, sample_ptr, positions_ptr, row, first_col, batch, cols, rows, threshold,
                QUADS, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            dx = tl.where(keep, dx * scale, 0.0)
            target = dx_ptr + (row * cols)[:, None] + col[None, :]
            mask = (row < rows)[:, None] & (col < cols)[None, :]
            tl.store(target, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dbias += dx
        row = ahead
    if partial_ptr is not None:
        tl.store(partial_ptr + split.to(tl.int64) * cols + col, tl.sum(dbias, axis=0), mask=col < cols)


def forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, key: Tensor | None,
    iteration: Tensor | None, sample_index: Tensor | None, positions: Tensor | None,
) -> Tensor:  # fmt: skip
    """x, residual [S, B, H] -> y [S, B, H] in the residual's dtype. key is None where nothing is dropped."""
    y = contiguous_like(residual)
    if y.numel() == 0:
        return y
    _, batch, cols = x.shape
    x_rows, residual_rows = as_rows(x), as_rows(residual)
    rows, config = x_rows.shape[0], tile_config(cols)
    grid = (ceil_div(cols, config.block_cols) * ceil_div(rows, config.block_rows),)
    with on_device_of(x):
        _bias_dropout_add_fwd_kernel[grid](
            x_rows, bias, residual_rows, y, key, iteration, sample_index, positions,
            rows, cols, x_rows.stride(0), residual_rows.stride(0), batch, keep_threshold(probability),
            1.0 / (1.0 - probability), key is not None, cols % 4 == 0 and config.block_cols >= 4,
            config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return y


def backward(
    dy: Tensor, bias: Tensor | None, main_grad: Tensor | None, probability: float, key: Tensor | None,
    iteration: Tensor | None, sample_index: Tensor | None, positions: Tensor | None, x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx [S, B, H], dbias [H]).

    dx is empty where nothing is dropped (it is dy then), dbias without a bias, and where it was added to
    main_grad.
    """
    dx = dy.new_empty(0, dtype=x_dtype) if key is None else contiguous_like(dy, x_dtype)
    _, batch, cols = dy.shape
    dbias = (dy if bias is None else bias).new_empty(cols if bias is not None and main_grad is None else 0)
    if dy.numel() == 0:
        return dx, dbias.zero_()
    dy_rows = as_rows(dy)
    rows, config = dy_rows.shape[0], tile_config(cols)
    strips, splits = ceil_div(cols, config.block_cols), ceil_div(rows, config.block_rows)
    partial = None
    if bias is not None:  # few partial sums, each of a long strip
        splits = min(splits, max(1, PROGRAMS_PER_SM * num_sms(dy.get_device()) // strips))
        partial = dy.new_empty((splits, cols), dtype=torch.float32)
    with on_device_of(dy):
        _bias_dropout_add_bwd_kernel[(strips * splits,)](
            dy_rows, dx, partial, key, iteration, sample_index, positions,
            rows, cols, dy_rows.stride(0), batch, keep_threshold(probability), 1.0 / (1.0 - probability),
            splits, key is not None, cols % 4 == 0 and config.block_cols >= 4,
            config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
        if partial is not None:
            column_sums(Sum.of(partial, dbias, main_grad))
    return dx, dbias
