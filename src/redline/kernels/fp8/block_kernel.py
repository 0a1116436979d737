"""Casts to fp8 by blocks in Triton: a tile, read once, gives both layouts and all scales.

As in turned.py a program takes its rows four at a time, and what goes through shared memory to be turned is
words of four bytes. The largest values of the blocks along C and of those along T come from the same registers.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import on_device_of
from redline.kernels.fp8.block_reference import SIDE, TOP, Blocks, padded_rows, padded_squares
from redline.kernels.fp8.device import fp8, limit_of, tile_at, words
from redline.kernels.fp8.kernel import _near_rows
from redline.kernels.fp8.tiles import TILES
from redline.kernels.fp8.turned import _row_of, _store_row, _store_turned
from redline.kernels.launch import launchable


@triton.jit
def _size(x, MAX: tl.constexpr):
    """What counts of a value: no NaN does, and NVIDIA's maximum (MAX is 0) passes it over by itself."""
    size = tl.abs(x)
    if MAX > 0:
        size = tl.where(x == x, size, 0.0)
    return size


@triton.jit
def _scale(largest, TOP_EXPONENT: tl.constexpr):
    """The scale 2^k for these largest values: block_reference.exponents without what cannot occur.

    The carry out of a mantissa above 1.75 makes the exponent one larger, that of Inf stays 255. So k + 127 is
    at least TOP - 1, and only the upper bound is left. Blocks of zeros get any scale.
    """
    bits = largest.to(tl.int32, bitcast=True)
    biased = tl.minimum(TOP_EXPONENT + 254 - ((bits + 0x1FFFFF) >> 23), 253)
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(largest, TOP_EXPONENT: tl.constexpr):
    """2^-k, 1 for a block of zeros."""
    bits = 0x7F000000 - _scale(largest, TOP_EXPONENT).to(tl.int32, bitcast=True)
    return tl.where(largest == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _cast_row(x, q_ptr, TOP_EXPONENT: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    """(q [R, C], largest values [R, C / BLOCK]) of x [R, C] in blocks along C."""
    blocks = tl.reshape(x, (x.shape[0], x.shape[1] // BLOCK, BLOCK))
    largest = tl.maximum(tl.max(_size(blocks, MAX), axis=2), 0.0)
    q = fp8(blocks, _scale(largest, TOP_EXPONENT)[:, :, None], MAX, q_ptr)
    return tl.reshape(q, x.shape), largest


@triton.jit
def _cast_column(x, scale, q_ptr, MAX: tl.constexpr):
    """q [R, C] of x [R, C] in blocks along R whose scales are [B, C]."""
    blocks = tl.reshape(x, (scale.shape[0], x.shape[0] // scale.shape[0], x.shape[1]))
    return tl.reshape(fp8(blocks, scale[:, None, :], MAX, q_ptr), x.shape)


@triton.jit
def _store_inverse(
    ptr, largest, block, lane, stride, blocks, lanes, TOP_EXPONENT: tl.constexpr
):  # fmt: skip
    """Inverse scales for `largest` [B, M], as rows `block`, columns `lane` of [blocks, stride]."""
    mask = (block < blocks)[:, None] & (lane < lanes)[None, :]
    tl.store(ptr + (block * stride)[:, None] + lane[None, :], _inverse(largest, TOP_EXPONENT), mask=mask)


@launchable
@triton.jit
def _block_cast_kernel(
    x_ptr, q_ptr, inverse_ptr, qt_ptr, inverse_t_ptr, rows, padded, cols, x_stride,
    TOP_EXPONENT: tl.constexpr, MAX: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile, strip = tile_at(tl.program_id(0), padded, cols, BLOCK_ROWS, BLOCK_COLS, GROUP)
    first_row, first_col = tile * BLOCK_ROWS, strip * BLOCK_COLS
    rows_here, cols_here = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
    left = (padded - first_row).to(tl.int32)
    word, lane, col = tl.arange(0, BLOCK_ROWS // 4), tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLS)
    row = word * 4
    x_ptr += first_row * x_stride + first_col
    a = _row_of(x_ptr, row, x_stride, col, rows_here, cols_here).to(tl.float32)
    b = _row_of(x_ptr, row + 1, x_stride, col, rows_here, cols_here).to(tl.float32)
    c = _row_of(x_ptr, row + 2, x_stride, col, rows_here, cols_here).to(tl.float32)
    d = _row_of(x_ptr, row + 3, x_stride, col, rows_here, cols_here).to(tl.float32)

    q_a, top_a = _cast_row(a, q_ptr, TOP_EXPONENT, MAX, BLOCK)
    q_b, top_b = _cast_row(b, q_ptr, TOP_EXPONENT, MAX, BLOCK)
    q_c, top_c = _cast_row(c, q_ptr, TOP_EXPONENT, MAX, BLOCK)
    q_d, top_d = _cast_row(d, q_ptr, TOP_EXPONENT, MAX, BLOCK)
    q_ptr += first_row * cols + first_col
    _store_row(q_ptr, q_a, row, cols, col, left, cols_here)
    _store_row(q_ptr, q_b, row + 1, cols, col, left, cols_here)
    _store_row(q_ptr, q_c, row + 2, cols, col, left, cols_here)
    _store_row(q_ptr, q_d, row + 3, cols, col, left, cols_here)
    fours = tl.join(tl.join(top_a, top_c), tl.join(top_b, top_d))  # [R / 4, C / BLOCK, 2, 2]
    largest = tl.reshape(tl.permute(fours, (1, 0, 2, 3)), (BLOCK_COLS // BLOCK, BLOCK_ROWS))
    block = tl.arange(0, BLOCK_COLS // BLOCK)
    inverse_ptr += first_col // BLOCK * padded + first_row
    _store_inverse(inverse_ptr, largest, block, lane, padded, cols_here // BLOCK, left, TOP_EXPONENT)

    if COLUMNS:
        pairs = tl.maximum(_size(a, MAX), _size(b, MAX)), tl.maximum(_size(c, MAX), _size(d, MAX))
        blocks = tl.reshape(tl.maximum(*pairs), (BLOCK_ROWS // BLOCK, BLOCK // 4, BLOCK_COLS))
        largest = tl.maximum(tl.max(blocks, axis=1), 0.0)
        scale = _scale(largest, TOP_EXPONENT)
        q_a = _cast_column(a, scale, qt_ptr, MAX)
        q_b = _cast_column(b, scale, qt_ptr, MAX)
        q_c = _cast_column(c, scale, qt_ptr, MAX)
        q_d = _cast_column(d, scale, qt_ptr, MAX)
        wide = padded // 4
        qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + first_col * wide + first_row // 4
        _store_turned(qt_ptr, words(q_a, q_b, q_c, q_d, MAX), word, wide, col, left // 4, cols_here)
        block = tl.arange(0, BLOCK_ROWS // BLOCK)
        inverse_t_ptr += first_row // BLOCK * cols + first_col
        _store_inverse(inverse_t_ptr, largest, block, col, cols, left // BLOCK, cols_here, TOP_EXPONENT)


@launchable
@triton.jit
def _square_cast_kernel(
    w_ptr, q_ptr, inverse_ptr, qt_ptr, inverse_t_ptr, rows, cols, inverse_stride, inverse_t_stride,
    TOP_EXPONENT: tl.constexpr, MAX: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block, strip = tile_at(tl.program_id(0), rows, cols, SIZE, SIZE, GROUP)
    word, col = tl.arange(0, SIZE // 4), tl.arange(0, SIZE)
    row = word * 4
    w_ptr += block * SIZE * cols + strip * SIZE
    a = _row_of(w_ptr, row, cols, col, SIZE, SIZE).to(tl.float32)
    b = _row_of(w_ptr, row + 1, cols, col, SIZE, SIZE).to(tl.float32)
    c = _row_of(w_ptr, row + 2, cols, col, SIZE, SIZE).to(tl.float32)
    d = _row_of(w_ptr, row + 3, cols, col, SIZE, SIZE).to(tl.float32)
    pairs = tl.maximum(_size(a, MAX), _size(b, MAX)), tl.maximum(_size(c, MAX), _size(d, MAX))
    largest = tl.maximum(tl.max(tl.maximum(*pairs)), 0.0)
    scale = _scale(largest, TOP_EXPONENT)
    a = fp8(a, scale, MAX, q_ptr)
    b = fp8(b, scale, MAX, q_ptr)
    c = fp8(c, scale, MAX, q_ptr)
    d = fp8(d, scale, MAX, q_ptr)
    q_ptr += block * SIZE * cols + strip * SIZE
    _store_row(q_ptr, a, row, cols, col, SIZE, SIZE)
    _store_row(q_ptr, b, row + 1, cols, col, SIZE, SIZE)
    _store_row(q_ptr, c, row + 2, cols, col, SIZE, SIZE)
    _store_row(q_ptr, d, row + 3, cols, col, SIZE, SIZE)
    wide = rows // 4
    qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + strip * SIZE * wide + block * (SIZE // 4)
    _store_turned(qt_ptr, words(a, b, c, d, MAX), word, wide, col, SIZE // 4, SIZE)
    inverse = _inverse(largest, TOP_EXPONENT)
    tl.store(inverse_ptr + block * inverse_stride + strip, inverse)
    tl.store(inverse_t_ptr + strip * inverse_t_stride + block, inverse)


def block_cast(x: Tensor, dtype: torch.dtype, block: int, columns: bool) -> Blocks:
    """As block_reference.block_cast."""
    x = _near_rows(x)
    rows, cols = x.shape
    padded = padded_rows(rows)

    def operand(M: int, K: int, wanted: bool) -> tuple[Tensor, Tensor]:
        q = torch.empty((M, K) if wanted else 0, dtype=dtype, device=x.device)
        scales = (K // block, M) if wanted else 0
        return q, torch.empty(scales, dtype=torch.float32, device=x.device)

    straight, turned = operand(padded, cols, True), operand(cols, padded, columns)
    if x.numel():
        tile = TILES["blocks"]
        with on_device_of(x):
            _block_cast_kernel[tile.grid(padded, cols, x)](
                x, *straight, *turned, rows, padded, cols, x.stride(0), TOP[dtype], limit_of(dtype, x),
                columns, block, tile.rows, tile.cols, tile.group, num_warps=tile.warps,
            )  # fmt: skip
    return *straight, *turned


def square_cast(w: Tensor, dtype: torch.dtype) -> Blocks:
    """As block_reference.square_cast."""
    w = w.contiguous()
    rows, cols = w.shape
    q, qt = (torch.empty(size, dtype=dtype, device=w.device) for size in ((rows, cols), (cols, rows)))
    inverse = torch.zeros((rows // SIDE, padded_squares(cols)), device=w.device)
    inverse_t = torch.zeros((cols // SIDE, padded_squares(rows)), device=w.device)
    if w.numel():
        tile = TILES["squares"]
        with on_device_of(w):
            _square_cast_kernel[tile.grid(rows, cols, w)](
                w, q, inverse, qt, inverse_t, rows, cols, inverse.stride(0), inverse_t.stride(0),
                TOP[dtype], limit_of(dtype, w), tile.rows, tile.group, num_warps=tile.warps,
            )  # fmt: skip
    return q, inverse, qt, inverse_t
