"""Both layouts of an fp8 tensor out of one read: [T, C] as it comes, and [C, T'] from the same registers.

A program takes its rows four at a time, and packs the four bytes of a column into one word. What goes through
shared memory to be turned is then words: as many bytes as the tensor has, none of them moved alone. Words
stand along T', whose padding to a multiple of 16 is written as zeros.

Rows leave as words too, so C must be a multiple of 16 for both layouts: where single bytes were stored beside
words of the same values, ptxas 12.8 lost the bytes' registers and stored others (tests/kernels/sm90.py looks
for that in every kernel, in each dtype and curve, if not in all of them together). Of another C the launchers
of kernel.py have q^T made here, and turn it back. ptxas lost them too where Triton made a constant of one
row, which leaves three of four rows to be zeros: so `rows` is no argument to specialise on.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from redline.kernels.fp8.device import (
    corner,
    four_rows,
    fp8,
    kept,
    largest_magnitude,
    largest_of,
    narrowed,
    row_of,
    shifted,
    store_four_rows,
    store_turned,
    widened,
    words,
)
from redline.kernels.launch import launchable
from redline.kernels.triton_common import activate_and_slope, at_most, beyond, within


@triton.jit
def _store_both(
    a, b, c, d, scale, q_ptr, qt_ptr, first_row, first_col, width, t_stride, rows, cols,
    MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Four rows into q [., width] and, as words, into qt [., t_stride / 4].

    `rows` and `cols` are how many there are from the tile's first on; `first_col` counts in q.
    """
    word, col = tl.arange(0, BLOCK_ROWS // 4), tl.arange(0, BLOCK_COLS)
    a = fp8(a, scale, MAX, qt_ptr)
    b = fp8(b, scale, MAX, qt_ptr)
    c = fp8(c, scale, MAX, qt_ptr)
    d = fp8(d, scale, MAX, qt_ptr)
    if ROWS:
        q_ptr += first_row * width + first_col
        store_four_rows(q_ptr, a, b, c, d, word * 4, width, col, rows, cols)
    wide = t_stride // 4
    qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + first_col * wide + first_row // 4
    words_here = (wide - first_row // 4).to(tl.int32)
    store_turned(qt_ptr, words(a, b, c, d, MAX), word, wide, col, words_here, cols)


@launchable
@triton.jit(do_not_specialize=["rows"])
def _cast_both_kernel(
    x_ptr, scale_ptr, amax_ptr, q_ptr, qt_ptr, rows, cols, x_stride, t_stride,
    MAX: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    first_row, first_col = corner(BLOCK_ROWS, BLOCK_COLS, GROUP)
    rows_here, cols_here = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
    row, col = tl.arange(0, BLOCK_ROWS // 4) * 4, tl.arange(0, BLOCK_COLS)
    x_ptr += first_row * x_stride + first_col
    a, b, c, d = four_rows(x_ptr, row, x_stride, col, rows_here, cols_here)
    largest = largest_of(tl.zeros_like(a), a, b, c, d, MAX)
    _store_both(
        a, b, c, d, scale, q_ptr, qt_ptr, first_row, first_col, cols, t_stride, rows_here, cols_here,
        MAX, ROWS, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    tl.atomic_max(amax_ptr, largest_magnitude(largest), sem="relaxed")


@launchable
@triton.jit
def _transpose_kernel(
    q_ptr, qt_ptr, rows, cols, q_stride, t_stride, MAX: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """WHOLE: every tile is, and masks would take the registers of a thread with many rows."""
    first_row, first_col = corner(BLOCK_ROWS, BLOCK_COLS, GROUP)
    word, col = tl.arange(0, BLOCK_ROWS // 4), tl.arange(0, BLOCK_COLS)
    wide = t_stride // 4
    qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + first_col * wide + first_row // 4
    rows_here, cols_here, words_here = None, None, None
    if not WHOLE:
        rows_here, cols_here = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
        words_here = (wide - first_row // 4).to(tl.int32)
    q_ptr += first_row * q_stride + first_col
    a, b, c, d = four_rows(q_ptr, word * 4, q_stride, col, rows_here, cols_here)
    store_turned(qt_ptr, words(a, b, c, d, MAX), word, wide, col, words_here, cols_here)


@triton.jit
def _gradients(
    dy, gate, up, bias, up_bias, row, rows, like_ptr,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Rows `row` of the gradients (of the gate, of up) in the dtype of like_ptr."""
    dy, gate = widened(dy, MAX), widened(gate, MAX)
    if bias is not None:
        gate += bias
    value, slope = activate_and_slope(at_most(gate, LIMIT), KIND, True, MAX == 0)
    dup = dy
    if GATED:
        up = widened(up, MAX)
        if bias is not None:
            up += up_bias
        dup = dy * value
        if LIMIT is not None:  # beyond it a gradient is 0
            dup = tl.where(beyond(up, LIMIT), 0.0, dup)
            dy = tl.where(gate > LIMIT, 0.0, dy)
        dy *= shifted(within(up, LIMIT), SHIFT)
    dgate, dup = narrowed(dy * slope, MAX, like_ptr), narrowed(dup, MAX, like_ptr)
    if bias is not None:  # an infinite bias must not count where there is no row; 0 times the rest is 0
        here = (row < rows)[:, None]
        dgate, dup = kept(dgate, here, MAX), kept(dup, here, MAX)
    return dgate, dup


@triton.jit
def _sum_of(a, b, c, d, MAX: tl.constexpr):
    return (widened(a, MAX) + widened(b, MAX)) + (widened(c, MAX) + widened(d, MAX))


@launchable
@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, scale_ptr, amax_ptr, q_ptr, qt_ptr, partial_ptr,
    rows, cols, dy_stride, x_stride, t_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, MAX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """With a bias, partial [blocks of rows, width] gets the sums of each block.

    All that a program reads is on its way before it works on any of it: ptxas would move a load down to where
    its value is used, and memory's answer be waited for once a row. It moves none into a branch, so one that
    is always taken, but in the programs that round up a group, stands between the two.
    """
    scale = tl.load(scale_ptr)
    first_row, first_col = corner(BLOCK_ROWS, BLOCK_COLS, GROUP)
    rows_here, cols_here = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
    row, col = tl.arange(0, BLOCK_ROWS // 4) * 4, tl.arange(0, BLOCK_COLS)
    dy_ptr += first_row * dy_stride + first_col
    x_ptr += first_row * x_stride + first_col
    bias, up_bias, width = None, None, cols
    if bias_ptr is not None:  # read as the rows are, by the thread that needs it
        bias = widened(row_of(bias_ptr + first_col, row, 0, col, BLOCK_ROWS, cols_here), MAX)
    dy = four_rows(dy_ptr, row, dy_stride, col, rows_here, cols_here)
    gate = four_rows(x_ptr, row, x_stride, col, rows_here, cols_here)
    up = dy
    if GATED:
        width = cols * 2
        up = four_rows(x_ptr + cols, row, x_stride, col, rows_here, cols_here)
        if bias_ptr is not None:
            up_bias = widened(row_of(bias_ptr + cols + first_col, row, 0, col, BLOCK_ROWS, cols_here), MAX)
    sums = tl.zeros([BLOCK_ROWS // 4, BLOCK_COLS], tl.float32)
    up_sums, largest = sums, tl.zeros([BLOCK_ROWS // 4, BLOCK_COLS], x_ptr.dtype.element_ty)
    if rows_here > 0:
        a, a_up = _gradients(
            dy[0], gate[0], up[0], bias, up_bias, row, rows_here, x_ptr, KIND, GATED, LIMIT, SHIFT, MAX
        )
        b, b_up = _gradients(
            dy[1], gate[1], up[1], bias, up_bias, row + 1, rows_here, x_ptr, KIND, GATED, LIMIT, SHIFT, MAX
        )
        c, c_up = _gradients(
            dy[2], gate[2], up[2], bias, up_bias, row + 2, rows_here, x_ptr, KIND, GATED, LIMIT, SHIFT, MAX
        )
        d, d_up = _gradients(
            dy[3], gate[3], up[3], bias, up_bias, row + 3, rows_here, x_ptr, KIND, GATED, LIMIT, SHIFT, MAX
        )
        largest = largest_of(largest, a, b, c, d, MAX)
        if GATED:
            largest = largest_of(largest, a_up, b_up, c_up, d_up, MAX)
        if bias_ptr is not None:
            sums = _sum_of(a, b, c, d, MAX)
        _store_both(
            a, b, c, d, scale, q_ptr, qt_ptr, first_row, first_col, width, t_stride, rows_here, cols_here,
            MAX, ROWS, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        if GATED:
            if bias_ptr is not None:
                up_sums = _sum_of(a_up, b_up, c_up, d_up, MAX)
            _store_both(
                a_up, b_up, c_up, d_up, scale, q_ptr, qt_ptr, first_row, cols + first_col, width, t_stride,
                rows_here, cols_here, MAX, ROWS, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
    if bias_ptr is not None:
        partial_ptr += first_row // BLOCK_ROWS * width + first_col
        mask = (col < cols_here) & (rows_here > 0)
        tl.store(partial_ptr + col, tl.sum(sums, axis=0), mask=mask)
        if GATED:
            tl.store(partial_ptr + cols + col, tl.sum(up_sums, axis=0), mask=mask)
    tl.atomic_max(amax_ptr, largest_magnitude(largest), sem="relaxed")
