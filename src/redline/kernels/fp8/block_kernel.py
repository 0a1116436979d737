"""Casts to fp8 by blocks in Triton: a tile, read once, gives both layouts and all scales.

As in turned.py a program takes its rows four at a time, and what goes through shared memory to be turned is
words of four bytes. The largest values of the blocks along C and of those along T come from the same
registers, of bf16 two at a time: the arithmetic of a value takes about as long as its way to memory.
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
from redline.kernels.fp8.device import corner, four_rows, fp8, limit_of, store_four_rows, store_turned, words
from redline.kernels.fp8.kernel import near_rows
from redline.kernels.fp8.tiles import TILES
from redline.kernels.launch import launchable


@triton.jit
def _size(x, MAX: tl.constexpr):
    """What counts of a value: no NaN does, and NVIDIA's maximum (MAX is 0) passes it over by itself."""
    size = tl.abs(x)
    if MAX > 0:
        size = tl.where(x == x, size, 0.0)
    return size


@triton.jit
def _inverse_bits(largest, TOP_EXPONENT: tl.constexpr):
    """The bits of 2^-k for these largest values: block_reference.exponents without what cannot occur.

    The carry out of a mantissa above 1.75 makes an exponent one larger; that of Inf is what fp32's largest
    number has then. So k is never too small, and only its upper bound is left.
    """
    bits = tl.maximum(largest.to(tl.int32, bitcast=True) + 0x1FFFFF, (TOP_EXPONENT + 1) << 23)
    return (bits & 0x7F800000) - (TOP_EXPONENT << 23)


@triton.jit
def _scale(largest, TOP_EXPONENT: tl.constexpr):
    """The scale 2^k; some power of two for zeros and NaN, which it does not change."""
    return (0x7F000000 - _inverse_bits(largest, TOP_EXPONENT)).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(largest, TOP_EXPONENT: tl.constexpr):
    """2^-k, 1 for a block of zeros or of NaN alone."""
    return tl.where(largest > 0, _inverse_bits(largest, TOP_EXPONENT).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _larger(a, b):
    """The larger size of two values in bf16, two at a time; its sign means nothing."""
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _larger_pair(a, b):
    """As _larger, of two pairs in int32."""
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _pair(low, high):
    """Two values in bf16 as one int32."""
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    high = high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | high << 16).to(tl.int32, bitcast=True)


@triton.jit
def _unpaired(pair):
    """The sizes of the two values of an int32 in fp32."""
    low, high = pair << 16 & 0x7FFFFFFF, pair & 0x7FFF0000
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _two_of_eight(x):
    """The largest size of eight neighbours of x [R, C]: of the even ones and of the odd ones [R, C / 8]."""
    eights = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 4))
    left, right = tl.split(tl.permute(eights, (0, 1, 3, 2)))
    fours = tl.reshape(_larger(left, right), (x.shape[0], x.shape[1] // 8, 2, 2))
    left, right = tl.split(tl.permute(fours, (0, 1, 3, 2)))
    return tl.split(_larger(left, right))


@triton.jit
def _largest_of_two_rows(a, b, BLOCK: tl.constexpr):
    """Each [R, C / BLOCK] in fp32, for rows in bf16 [R, C]: they share what one goes between lanes in."""
    a_even, a_odd = _two_of_eight(a)
    b_even, b_odd = _two_of_eight(b)
    pairs = _larger_pair(_pair(a_even, b_even), _pair(a_odd, b_odd))
    blocks = tl.reshape(pairs, (a.shape[0], a.shape[1] // BLOCK, BLOCK // 8))
    return _unpaired(tl.reduce(blocks, 2, _larger_pair))


@triton.jit
def _largest_of_columns(a, b, c, d, BLOCK: tl.constexpr):
    """[4 R / BLOCK, C] in fp32, for rows in bf16 [R, C]."""
    x = _larger(_larger(a, b), _larger(c, d))
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    blocks = tl.reshape(_pair(even, odd), (4 * x.shape[0] // BLOCK, BLOCK // 4, x.shape[1] // 2))
    even, odd = _unpaired(tl.reduce(blocks, 1, _larger_pair))
    return tl.reshape(tl.join(even, odd), (4 * x.shape[0] // BLOCK, x.shape[1]))


@triton.jit
def _largest_of_row(x, MAX: tl.constexpr, BLOCK: tl.constexpr):
    """[R, C / BLOCK] in fp32, for rows in any dtype [R, C]."""
    blocks = tl.reshape(_size(x.to(tl.float32), MAX), (x.shape[0], x.shape[1] // BLOCK, BLOCK))
    return tl.max(blocks, axis=2)


@triton.jit
def _largest_size(a, b, c, d, MAX: tl.constexpr):
    """[R, C] in fp32 of four rows in any dtype; NaN where NVIDIA's maximum met nothing else."""
    a, b = _size(a.to(tl.float32), MAX), _size(b.to(tl.float32), MAX)
    c, d = _size(c.to(tl.float32), MAX), _size(d.to(tl.float32), MAX)
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _largest_of_column(a, b, c, d, MAX: tl.constexpr, BLOCK: tl.constexpr):
    """[4 R / BLOCK, C] in fp32, for rows in any dtype [R, C]."""
    x = _largest_size(a, b, c, d, MAX)
    blocks = tl.reshape(x, (4 * x.shape[0] // BLOCK, BLOCK // 4, x.shape[1]))
    return tl.max(blocks, axis=1)


@triton.jit
def _cast_row(x, largest, q_ptr, TOP_EXPONENT: tl.constexpr, MAX: tl.constexpr):
    """q [R, C] of x [R, C] in blocks along C whose largest values are [R, B]."""
    blocks = tl.reshape(x.to(tl.float32), (x.shape[0], largest.shape[1], x.shape[1] // largest.shape[1]))
    return tl.reshape(fp8(blocks, _scale(largest, TOP_EXPONENT)[:, :, None], MAX, q_ptr), x.shape)


@triton.jit
def _again(x, MAX: tl.constexpr):
    """x in fp32, where it was converted before: from bf16, so that nobody keeps it in fp32 until then."""
    if MAX == 0 and x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;",
            "=&r,=&r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        ).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _cast_column(x, scale, q_ptr, MAX: tl.constexpr):
    """q [R, C] of x [R, C] in blocks along R whose scales are [B, C]."""
    blocks = tl.reshape(_again(x, MAX), (scale.shape[0], x.shape[0] // scale.shape[0], x.shape[1]))
    return tl.reshape(fp8(blocks, scale[:, None, :], MAX, q_ptr), x.shape)


@triton.jit
def _store_inverse(
    ptr, largest, block, lane, stride, blocks, lanes, TOP_EXPONENT: tl.constexpr
):  # fmt: skip
    """Inverse scales for `largest` [B, M], as rows `block`, columns `lane` of [blocks, stride]."""
    mask = (block < blocks)[:, None] & (lane < lanes)[None, :]
    tl.store(ptr + (block * stride)[:, None] + lane[None, :], _inverse(largest, TOP_EXPONENT), mask=mask)


@launchable
@triton.jit(do_not_specialize=["rows"])  # turned.py says why
def _block_cast_kernel(
    x_ptr, q_ptr, inverse_ptr, qt_ptr, inverse_t_ptr, rows, padded, cols, x_stride,
    TOP_EXPONENT: tl.constexpr, MAX: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    first_row, first_col = corner(BLOCK_ROWS, BLOCK_COLS, GROUP)
    rows_here, cols_here = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
    left = (padded - first_row).to(tl.int32)
    word, lane, col = tl.arange(0, BLOCK_ROWS // 4), tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLS)
    row = word * 4
    x_ptr += first_row * x_stride + first_col
    a, b, c, d = four_rows(x_ptr, row, x_stride, col, rows_here, cols_here)
    PAIRS: tl.constexpr = MAX == 0 and x_ptr.dtype.element_ty == tl.bfloat16
    if PAIRS:
        top_a, top_b = _largest_of_two_rows(a, b, BLOCK)
        top_c, top_d = _largest_of_two_rows(c, d, BLOCK)
    else:
        top_a, top_b = _largest_of_row(a, MAX, BLOCK), _largest_of_row(b, MAX, BLOCK)
        top_c, top_d = _largest_of_row(c, MAX, BLOCK), _largest_of_row(d, MAX, BLOCK)
    q_a = _cast_row(a, top_a, q_ptr, TOP_EXPONENT, MAX)
    q_b = _cast_row(b, top_b, q_ptr, TOP_EXPONENT, MAX)
    q_c = _cast_row(c, top_c, q_ptr, TOP_EXPONENT, MAX)
    q_d = _cast_row(d, top_d, q_ptr, TOP_EXPONENT, MAX)
    q_ptr += first_row * cols + first_col
    store_four_rows(q_ptr, q_a, q_b, q_c, q_d, row, cols, col, left, cols_here)
    fours = tl.join(tl.join(top_a, top_c), tl.join(top_b, top_d))  # [R / 4, C / BLOCK, 2, 2]
    largest = tl.reshape(tl.permute(fours, (1, 0, 2, 3)), (BLOCK_COLS // BLOCK, BLOCK_ROWS))
    block = tl.arange(0, BLOCK_COLS // BLOCK)
    inverse_ptr += first_col // BLOCK * padded + first_row
    _store_inverse(inverse_ptr, largest, block, lane, padded, cols_here // BLOCK, left, TOP_EXPONENT)

    if COLUMNS:
        if PAIRS:
            largest = _largest_of_columns(a, b, c, d, BLOCK)
        else:
            largest = _largest_of_column(a, b, c, d, MAX, BLOCK)
        scale = _scale(largest, TOP_EXPONENT)
        q_a = _cast_column(a, scale, qt_ptr, MAX)
        q_b = _cast_column(b, scale, qt_ptr, MAX)
        q_c = _cast_column(c, scale, qt_ptr, MAX)
        q_d = _cast_column(d, scale, qt_ptr, MAX)
        wide = padded // 4
        qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + first_col * wide + first_row // 4
        store_turned(qt_ptr, words(q_a, q_b, q_c, q_d, MAX), word, wide, col, left // 4, cols_here)
        block = tl.arange(0, BLOCK_ROWS // BLOCK)
        inverse_t_ptr += first_row // BLOCK * cols + first_col
        _store_inverse(inverse_t_ptr, largest, block, col, cols, left // BLOCK, cols_here, TOP_EXPONENT)


@launchable
@triton.jit
def _square_cast_kernel(
    w_ptr, q_ptr, inverse_ptr, qt_ptr, inverse_t_ptr, rows, cols, inverse_stride, inverse_t_stride,
    TOP_EXPONENT: tl.constexpr, MAX: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program a square, whole: there are no masks."""
    first_row, first_col = corner(SIZE, SIZE, 1)
    word, col = tl.arange(0, SIZE // 4), tl.arange(0, SIZE)
    row = word * 4
    w_ptr += first_row * cols + first_col
    a, b, c, d = four_rows(w_ptr, row, cols, col, SIZE, SIZE)
    largest = tl.max(_largest_size(a, b, c, d, MAX))
    scale = _scale(largest, TOP_EXPONENT)
    a = fp8(a, scale, MAX, q_ptr)
    b = fp8(b, scale, MAX, q_ptr)
    c = fp8(c, scale, MAX, q_ptr)
    d = fp8(d, scale, MAX, q_ptr)
    q_ptr += first_row * cols + first_col
    store_four_rows(q_ptr, a, b, c, d, row, cols, col, SIZE, SIZE)
    wide = rows // 4
    qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + first_col * wide + first_row // 4
    store_turned(qt_ptr, words(a, b, c, d, MAX), word, wide, col, SIZE // 4, SIZE)
    inverse, block, strip = _inverse(largest, TOP_EXPONENT), first_row // SIZE, first_col // SIZE
    tl.store(inverse_ptr + block * inverse_stride + strip, inverse)
    tl.store(inverse_t_ptr + strip * inverse_t_stride + block, inverse)


def block_cast(x: Tensor, dtype: torch.dtype, block: int, columns: bool) -> Blocks:
    """As block_reference.block_cast."""
    x = near_rows(x)
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
            _block_cast_kernel[tile.groups(padded, cols)](
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
        with on_device_of(w):
            _square_cast_kernel[(cols // SIDE, rows // SIDE)](
                w, q, inverse, qt, inverse_t, rows, cols, inverse.stride(0), inverse_t.stride(0),
                TOP[dtype], limit_of(dtype, w), SIDE, num_warps=TILES["squares"].warps,
            )  # fmt: skip
    return q, inverse, qt, inverse_t
