"""What the kernels that cast to fp8 share on the device's side: rounding, saturation, rows and words."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import on_nvidia
from redline.kernels.fp8.reference import FP8_MAX


def limit_of(dtype: torch.dtype, x: Tensor) -> float:
    """MAX, what kernels cut values off at; 0 on NVIDIA cards, whose instruction (cvt.satfinite) does it.

    Where it is 0, a kernel may also use other instructions of NVIDIA's, as `on_nvidia` says.
    """
    return 0.0 if on_nvidia(x) else FP8_MAX[dtype]


@triton.jit
def fp8(x, scale, MAX: tl.constexpr, out_ptr):
    """x * scale (in fp32) in the dtype of out_ptr, saturated; NaN stays. MAX: 0 if an instruction does it."""
    y = widened(x, MAX) * scale
    if MAX > 0:
        y = tl.where(y > MAX, MAX, tl.where(y < -MAX, -MAX, y))
    return y.to(out_ptr.dtype.element_ty)


@triton.jit
def narrowed(x, MAX: tl.constexpr, like_ptr):
    """x in fp32, in the dtype of like_ptr: what a GEMM in bf16 would read.

    Two values go through one conversion, where Triton makes two of them.
    """
    if MAX == 0 and like_ptr.dtype.element_ty == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = x.to(like_ptr.dtype.element_ty)
    return y


@triton.jit
def widened(x, MAX: tl.constexpr):
    """x in fp32. Each of two bf16 in a word is one instruction away; Triton's cast takes one or two."""
    if MAX == 0 and x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def rounded(x, MAX: tl.constexpr, like_ptr):
    """x in fp32, as the dtype of like_ptr would hold it."""
    return widened(narrowed(x, MAX, like_ptr), MAX)


@triton.jit
def kept(x, here, MAX: tl.constexpr):
    """x [R, C] in the rows `here` [R, 1], 0 elsewhere, be it NaN."""
    if MAX == 0 and x.dtype == tl.bfloat16:  # two at a time
        y = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;",
            "=r,r,r",
            [x, tl.where(here, -1, 0).to(tl.int16)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        y = tl.where(here, x, 0.0).to(x.dtype)
    return y


@triton.jit
def largest_of(largest, a, b, c, d, MAX: tl.constexpr):
    """The largest of four rows and of `largest` by absolute value, element by element; a NaN counts for none.

    Its sign means nothing. Of bf16 one instruction takes two, and they stay in half the registers.
    """
    if MAX == 0 and a.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, c;
            max.xorsign.abs.bf16x2 a, $2, $3;
            max.xorsign.abs.bf16x2 c, $4, $5;
            max.xorsign.abs.bf16x2 a, a, c;
            max.xorsign.abs.bf16x2 $0, a, $1;
            }""",
            "=r,r,r,r,r,r",
            [largest, a, b, c, d],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        y = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        y = tl.maximum(y, largest)
    return y


@triton.jit
def words(a, b, c, d, MAX: tl.constexpr):
    """The bytes of four rows [R, C] as one int32 a column [R, C], the first row's in its low bits.

    A word is what shared memory turns at full width; four by four bytes are turned in registers.
    """
    if MAX == 0:
        w = tl.inline_asm_elementwise(
            """{
            .reg .b32 ab01, ab23, cd01, cd23;
            prmt.b32 ab01, $4, $5, 0x5140;
            prmt.b32 ab23, $4, $5, 0x7362;
            prmt.b32 cd01, $6, $7, 0x5140;
            prmt.b32 cd23, $6, $7, 0x7362;
            prmt.b32 $0, ab01, cd01, 0x5410;
            prmt.b32 $1, ab01, cd01, 0x7632;
            prmt.b32 $2, ab23, cd23, 0x5410;
            prmt.b32 $3, ab23, cd23, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [
                a.to(tl.int8, bitcast=True),
                b.to(tl.int8, bitcast=True),
                c.to(tl.int8, bitcast=True),
                d.to(tl.int8, bitcast=True),
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        w = a.to(tl.uint8, bitcast=True).to(tl.int32) | b.to(tl.uint8, bitcast=True).to(tl.int32) << 8
        w |= c.to(tl.uint8, bitcast=True).to(tl.int32) << 16 | d.to(tl.uint8, bitcast=True).to(tl.int32) << 24
    return w


@triton.jit
def place(tile, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """(rows [BLOCK_ROWS] in 64 bits, columns [BLOCK_COLS]) of a tile."""
    strips = tl.cdiv(cols, BLOCK_COLS)
    row = (tile // strips).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, tile % strips * BLOCK_COLS + tl.arange(0, BLOCK_COLS)


@triton.jit
def corner(BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr):
    """The first row and column, in 64 bits, of a program's tile in the grid of Tile.groups.

    Nothing is divided, which would be some 20 instructions that loads wait for.
    """
    strip, block = tl.program_id(0), tl.program_id(1)
    if GROUP == 0:
        strip, block = block, strip
    elif GROUP > 1:
        block = block * GROUP + strip % GROUP
        strip = strip // GROUP
    return (block * BLOCK_ROWS).to(tl.int64), (strip * BLOCK_COLS).to(tl.int64)


@triton.jit
def largest_magnitude(x):
    """The largest of x [R, C], which has no NaN, by absolute value, in fp32. Of a warp's integers one
    instruction takes the largest."""
    if x.dtype == tl.bfloat16:
        top = tl.max(x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF)
        y = (top << 16).to(tl.float32, bitcast=True)
    else:
        y = tl.max(tl.abs(x.to(tl.float32)))
    return y


@triton.jit
def row_of(ptr, row, stride, col, rows, cols):
    """Columns `col` [C] of rows `row` [R] in their own dtype, 0 where there are none. No `rows`: all are."""
    mask, other = None, None
    if rows is not None:
        mask, other = (row < rows)[:, None] & (col < cols)[None, :], 0.0
    at = ptr + (row * stride)[:, None] + col[None, :]
    return tl.load(at, mask=mask, other=other)


@triton.jit
def four_rows(ptr, row, stride, col, rows, cols):
    """Rows `row` and the three after it, as row_of."""
    a = row_of(ptr, row, stride, col, rows, cols)
    b = row_of(ptr, row + 1, stride, col, rows, cols)
    c = row_of(ptr, row + 2, stride, col, rows, cols)
    d = row_of(ptr, row + 3, stride, col, rows, cols)
    return a, b, c, d


@triton.jit
def store_row(ptr, q, row, stride, col, rows, cols):
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(ptr + (row * stride)[:, None] + col[None, :], q, mask=mask)


@triton.jit
def store_four_rows(ptr, a, b, c, d, row, stride, col, rows, cols):
    """Into rows `row` and the three after it."""
    store_row(ptr, a, row, stride, col, rows, cols)
    store_row(ptr, b, row + 1, stride, col, rows, cols)
    store_row(ptr, c, row + 2, stride, col, rows, cols)
    store_row(ptr, d, row + 3, stride, col, rows, cols)


@triton.jit
def store_turned(ptr, word_RC, word, stride, col, words_here, cols):
    """Words [R, C] as rows `col` of a matrix of words. No `words_here`: all have their place."""
    mask = None
    if words_here is not None:
        mask = (col < cols)[:, None] & (word < words_here)[None, :]
    tl.store(ptr + (col * stride)[:, None] + word[None, :], tl.trans(word_RC), mask=mask)


@triton.jit
def shifted(up, SHIFT: tl.constexpr):
    """What the gate multiplies."""
    if SHIFT != 0.0:
        up += SHIFT
    return up
