"""Casts to fp8 by blocks in Triton: a tile of 128 x 128, read once, gives both layouts and all scales."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import as_rows, ceil_div, on_device_of
from redline.kernels.fp8.block_reference import SIDE, TOP, WIDEST, Blocks, padded_rows, padded_squares
from redline.kernels.fp8.reference import FP8_MAX
from redline.kernels.launch import launchable


@triton.jit
def _powers(largest, TOP_EXPONENT: tl.constexpr, WIDEST_EXPONENT: tl.constexpr):
    """(2^k, 2^-k) for these largest values; see block_reference.exponents."""
    bits = tl.minimum(largest.to(tl.int32, bitcast=True), 0x7F7FFFFF)
    k = TOP_EXPONENT - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    k = tl.minimum(tl.maximum(k, -WIDEST_EXPONENT), WIDEST_EXPONENT)
    k = tl.where(bits == 0, 0, k)
    return ((k + 127) << 23).to(tl.float32, bitcast=True), ((127 - k) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fp8(x, MAX: tl.constexpr, out_ptr):
    """x saturated (comparisons keep a NaN), in the dtype that out_ptr points to."""
    return tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x)).to(out_ptr.dtype.element_ty)


@triton.jit
def _store_tiles(
    x, q_ptr, inverse_ptr, row, first_col, first_block, rows, cols,
    TOP_EXPONENT: tl.constexpr, WIDEST_EXPONENT: tl.constexpr, MAX: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize x [SIZE, SIZE] in blocks of 1 x BLOCK, as a part of q [rows, cols]."""
    blocks = tl.reshape(x, (SIZE, SIZE // BLOCK, BLOCK))
    largest = tl.max(tl.where(blocks == blocks, tl.abs(blocks), 0.0), axis=2)
    scale, inverse = _powers(largest, TOP_EXPONENT, WIDEST_EXPONENT)
    q = tl.reshape(_fp8(blocks * scale[:, :, None], MAX, q_ptr), (SIZE, SIZE))
    col = first_col + tl.arange(0, SIZE)
    tl.store(
        q_ptr + row[:, None] * cols + col[None, :], q, mask=(row < rows)[:, None] & (col < cols)[None, :]
    )
    at = first_block + tl.arange(0, SIZE // BLOCK)
    mask = (row < rows)[:, None] & (at < cols // BLOCK)[None, :]
    tl.store(inverse_ptr + at[None, :].to(tl.int64) * rows + row[:, None], inverse, mask=mask)


@launchable
@triton.jit
def _block_cast_kernel(
    x_ptr, q_ptr, inverse_ptr, qt_ptr, inverse_t_ptr, rows, padded, cols, x_stride,
    TOP_EXPONENT: tl.constexpr, WIDEST_EXPONENT: tl.constexpr, MAX: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(cols, SIZE)
    first_row, first_col = (tl.program_id(0) // strips) * SIZE, (tl.program_id(0) % strips) * SIZE
    row = first_row.to(tl.int64) + tl.arange(0, SIZE)
    col = first_col.to(tl.int64) + tl.arange(0, SIZE)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    _store_tiles(
        x, q_ptr, inverse_ptr, row, first_col, first_col // BLOCK, padded, cols,
        TOP_EXPONENT, WIDEST_EXPONENT, MAX, BLOCK, SIZE,
    )  # fmt: skip
    if COLUMNS:
        _store_tiles(
            tl.trans(x), qt_ptr, inverse_t_ptr, col, first_row, first_row // BLOCK, cols, padded,
            TOP_EXPONENT, WIDEST_EXPONENT, MAX, BLOCK, SIZE,
        )  # fmt: skip


@launchable
@triton.jit
def _square_cast_kernel(
    w_ptr, q_ptr, inverse_ptr, qt_ptr, inverse_t_ptr, rows, cols, inverse_stride, inverse_t_stride,
    TOP_EXPONENT: tl.constexpr, WIDEST_EXPONENT: tl.constexpr, MAX: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    strips = cols // SIZE
    strip_row, strip_col = tl.program_id(0) // strips, tl.program_id(0) % strips
    row = strip_row.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    col = strip_col.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    w = tl.load(w_ptr + (row * cols)[:, None] + col[None, :]).to(tl.float32)
    scale, inverse = _powers(tl.max(tl.where(w == w, tl.abs(w), 0.0)), TOP_EXPONENT, WIDEST_EXPONENT)
    q = _fp8(w * scale, MAX, q_ptr)
    tl.store(q_ptr + (row * cols)[:, None] + col[None, :], q)
    tl.store(qt_ptr + (col * rows)[:, None] + row[None, :], tl.trans(q))
    tl.store(inverse_ptr + strip_row * inverse_stride + strip_col, inverse)
    tl.store(inverse_t_ptr + strip_col * inverse_t_stride + strip_row, inverse)


def block_cast(x: Tensor, dtype: torch.dtype, block: int, columns: bool) -> Blocks:
    """As block_reference.block_cast."""
    x = as_rows(x)
    rows, cols = x.shape
    padded = padded_rows(rows)

    def operand(M: int, K: int, wanted: bool) -> tuple[Tensor, Tensor]:
        q = torch.empty((M, K) if wanted else 0, dtype=dtype, device=x.device)
        scales = (K // block, M) if wanted else 0
        return q, torch.empty(scales, dtype=torch.float32, device=x.device)

    straight, turned = operand(padded, cols, True), operand(cols, padded, columns)
    if x.numel():
        with on_device_of(x):
            _block_cast_kernel[(padded // SIDE * ceil_div(cols, SIDE),)](
                x, *straight, *turned, rows, padded, cols, x.stride(0), TOP[dtype], WIDEST, FP8_MAX[dtype],
                columns, block, SIDE, num_warps=8,
            )  # fmt: skip
    return *straight, *turned


def square_cast(w: Tensor, dtype: torch.dtype) -> Blocks:
    """As block_reference.square_cast."""
    w = w.contiguous()
    rows, cols = w.shape
    q, qt = (torch.empty(size, dtype=dtype, device=w.device) for size in ((rows, cols), (cols, rows)))
    inverse = torch.zeros((rows // SIDE, padded_squares(cols)), device=w.device)
    inverse_t = torch.zeros((cols // SIDE, padded_squares(rows)), device=w.device)
    with on_device_of(w):
        _square_cast_kernel[(rows // SIDE * (cols // SIDE),)](
            w, q, inverse, qt, inverse_t, rows, cols, inverse.stride(0), inverse_t.stride(0),
            TOP[dtype], WIDEST, FP8_MAX[dtype], SIDE, num_warps=8,
        )  # fmt: skip
    return q, inverse, qt, inverse_t
