"""Both layouts of an fp8 tensor out of one read: [T, C] as it comes, and [C, T'] from the same registers.

A program takes its rows four at a time, and packs the four bytes of a column into one word. What goes through
shared memory to be turned is then words: as many bytes as the tensor has, none of them moved alone. Words
stand along T', whose padding to a multiple of 16 is written as zeros.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from redline.kernels.fp8.device import fp8, rounded, shifted, tile_at, words
from redline.kernels.launch import launchable
from redline.kernels.triton_common import activate_and_slope, at_most, beyond, within


@triton.jit
def _row_of(ptr, row, stride, col, rows, cols, EVICT: tl.constexpr):
    """Columns `col` [C] of rows `row` [R] in their own dtype, 0 where there are none."""
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    at = ptr + (row * stride)[:, None] + col[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def _store_row(ptr, q, row, stride, col, rows, cols):
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(ptr + (row * stride)[:, None] + col[None, :], q, mask=mask)


@triton.jit
def _store_turned(ptr, word_RC, word, stride, col, words_here, cols):
    """Words [R, C] as rows `col` of a matrix of words."""
    mask = (col < cols)[:, None] & (word < words_here)[None, :]
    tl.store(ptr + (col * stride)[:, None] + word[None, :], tl.trans(word_RC), mask=mask)


@triton.jit
def _largest(a, b, c, d):
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def _store_both(
    a, b, c, d, scale, q_ptr, qt_ptr, first_word, first_col, width, t_stride, rows, cols,
    MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Four rows in fp32, into q [., width] and, as words, into qt [., t_stride / 4].

    `rows` and `cols` are how many there are from the tile's first on; `first_col` counts in q.
    """
    word, col = tl.arange(0, BLOCK_ROWS // 4), tl.arange(0, BLOCK_COLS)
    a = fp8(a, scale, MAX, qt_ptr)
    b = fp8(b, scale, MAX, qt_ptr)
    c = fp8(c, scale, MAX, qt_ptr)
    d = fp8(d, scale, MAX, qt_ptr)
    if ROWS:
        q_ptr += first_word * 4 * width + first_col
        _store_row(q_ptr, a, word * 4, width, col, rows, cols)
        _store_row(q_ptr, b, word * 4 + 1, width, col, rows, cols)
        _store_row(q_ptr, c, word * 4 + 2, width, col, rows, cols)
        _store_row(q_ptr, d, word * 4 + 3, width, col, rows, cols)
    wide = t_stride // 4
    qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + first_col * wide + first_word
    words_here = (wide - first_word).to(tl.int32)
    _store_turned(qt_ptr, words(a, b, c, d, MAX), word, wide, col, words_here, cols)


@launchable
@triton.jit
def _cast_both_kernel(
    x_ptr, scale_ptr, amax_ptr, q_ptr, qt_ptr, rows, cols, x_stride, t_stride,
    MAX: tl.constexpr, ROWS: tl.constexpr, EVICT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    block, strip = tile_at(tl.program_id(0), rows, cols, BLOCK_ROWS, BLOCK_COLS, GROUP)
    first_word, first_col = block * (BLOCK_ROWS // 4), strip * BLOCK_COLS
    rows_here, cols_here = (rows - first_word * 4).to(tl.int32), (cols - first_col).to(tl.int32)
    row, col = tl.arange(0, BLOCK_ROWS // 4) * 4, tl.arange(0, BLOCK_COLS)
    x_ptr += first_word * 4 * x_stride + first_col
    a = _row_of(x_ptr, row, x_stride, col, rows_here, cols_here, EVICT).to(tl.float32)
    b = _row_of(x_ptr, row + 1, x_stride, col, rows_here, cols_here, EVICT).to(tl.float32)
    c = _row_of(x_ptr, row + 2, x_stride, col, rows_here, cols_here, EVICT).to(tl.float32)
    d = _row_of(x_ptr, row + 3, x_stride, col, rows_here, cols_here, EVICT).to(tl.float32)
    largest = _largest(a, b, c, d)
    _store_both(
        a, b, c, d, scale, q_ptr, qt_ptr, first_word, first_col, cols, t_stride, rows_here, cols_here,
        MAX, ROWS, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@launchable
@triton.jit
def _transpose_words_kernel(
    q_ptr, qt_ptr, rows, cols, q_stride, t_stride, MAX: tl.constexpr, EVICT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block, strip = tile_at(tl.program_id(0), rows, cols, BLOCK_ROWS, BLOCK_COLS, GROUP)
    first_word, first_col = block * (BLOCK_ROWS // 4), strip * BLOCK_COLS
    rows_here, cols_here = (rows - first_word * 4).to(tl.int32), (cols - first_col).to(tl.int32)
    word, col = tl.arange(0, BLOCK_ROWS // 4), tl.arange(0, BLOCK_COLS)
    q_ptr += first_word * 4 * q_stride + first_col
    a = _row_of(q_ptr, word * 4, q_stride, col, rows_here, cols_here, EVICT)
    b = _row_of(q_ptr, word * 4 + 1, q_stride, col, rows_here, cols_here, EVICT)
    c = _row_of(q_ptr, word * 4 + 2, q_stride, col, rows_here, cols_here, EVICT)
    d = _row_of(q_ptr, word * 4 + 3, q_stride, col, rows_here, cols_here, EVICT)
    wide = t_stride // 4
    qt_ptr = qt_ptr.to(tl.pointer_type(tl.int32)) + first_col * wide + first_word
    words_here = (wide - first_word).to(tl.int32)
    _store_turned(qt_ptr, words(a, b, c, d, MAX), word, wide, col, words_here, cols_here)


@triton.jit
def _plus(x, bias):
    """x + bias in fp32."""
    x = x.to(tl.float32)
    if bias is not None:
        x += bias.to(tl.float32)
    return x


@triton.jit
def _gradients(
    dy_ptr, x_ptr, gate_bias, up_bias, row, col, rows, cols, up_at, dy_stride, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    MAX: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Rows `row` of the gradients (of the gate, of up) in fp32, rounded to x's dtype; up_at: where up is."""
    dy = _row_of(dy_ptr, row, dy_stride, col, rows, cols, EVICT).to(tl.float32)
    gate = _plus(_row_of(x_ptr, row, x_stride, col, rows, cols, EVICT), gate_bias)
    value, slope = activate_and_slope(at_most(gate, LIMIT), KIND, MAX == 0)
    dup = dy
    if GATED:
        up = _plus(_row_of(x_ptr + up_at, row, x_stride, col, rows, cols, EVICT), up_bias)
        dup = dy * value
        if LIMIT is not None:  # beyond it a gradient is 0
            dup = tl.where(beyond(up, LIMIT), 0.0, dup)
            dy = tl.where(gate > LIMIT, 0.0, dy)
        dy *= shifted(within(up, LIMIT), SHIFT)
        dup = rounded(dup, MAX, x_ptr)
    dgate = rounded(dy * slope, MAX, x_ptr)
    if gate_bias is not None:  # a bias alone must not count; without one, dy = 0 and finite factors give 0
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        dgate = tl.where(mask, dgate, 0.0)
        dup = tl.where(mask, dup, 0.0)
    return dgate, dup


@triton.jit
def _backward_tile(
    dy_ptr, x_ptr, gate_bias, up_bias, scale, q_ptr, qt_ptr, first_word, first_col, rows, cols,
    dy_stride, x_stride, t_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    MAX: tl.constexpr, EVICT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Both layouts of a tile; each [R, C]: its largest values, sums over four rows: the gate's, up's."""
    rows_here, cols_here = (rows - first_word * 4).to(tl.int32), (cols - first_col).to(tl.int32)
    row, col = tl.arange(0, BLOCK_ROWS // 4) * 4, tl.arange(0, BLOCK_COLS)
    dy_ptr += first_word * 4 * dy_stride + first_col
    x_ptr += first_word * 4 * x_stride + first_col
    a, a_up = _gradients(
        dy_ptr, x_ptr, gate_bias, up_bias, row, col, rows_here, cols_here, cols, dy_stride, x_stride,
        KIND, GATED, LIMIT, SHIFT, MAX, EVICT,
    )  # fmt: skip
    b, b_up = _gradients(
        dy_ptr, x_ptr, gate_bias, up_bias, row + 1, col, rows_here, cols_here, cols, dy_stride, x_stride,
        KIND, GATED, LIMIT, SHIFT, MAX, EVICT,
    )  # fmt: skip
    c, c_up = _gradients(
        dy_ptr, x_ptr, gate_bias, up_bias, row + 2, col, rows_here, cols_here, cols, dy_stride, x_stride,
        KIND, GATED, LIMIT, SHIFT, MAX, EVICT,
    )  # fmt: skip
    d, d_up = _gradients(
        dy_ptr, x_ptr, gate_bias, up_bias, row + 3, col, rows_here, cols_here, cols, dy_stride, x_stride,
        KIND, GATED, LIMIT, SHIFT, MAX, EVICT,
    )  # fmt: skip
    width = cols * 2 if GATED else cols
    largest = _largest(a, b, c, d)
    _store_both(
        a, b, c, d, scale, q_ptr, qt_ptr, first_word, first_col, width, t_stride, rows_here, cols_here,
        MAX, True, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    if GATED:
        largest = tl.maximum(largest, _largest(a_up, b_up, c_up, d_up))
        _store_both(
            a_up, b_up, c_up, d_up, scale, q_ptr, qt_ptr, first_word, cols + first_col, width, t_stride,
            rows_here, cols_here, MAX, True, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    return largest, a + b + c + d, a_up + b_up + c_up + d_up


@launchable
@triton.jit
def _backward_both_kernel(
    dy_ptr, x_ptr, bias_ptr, scale_ptr, amax_ptr, q_ptr, qt_ptr, partial_ptr,
    rows, cols, dy_stride, x_stride, t_stride, splits,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, MAX: tl.constexpr,
    EVICT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A program takes one tile or, with a bias, every `splits`-th of a strip of columns, and adds them up."""
    scale = tl.load(scale_ptr)
    if bias_ptr is None:
        block, strip = tile_at(tl.program_id(0), rows, cols, BLOCK_ROWS, BLOCK_COLS, GROUP)
        largest, _, _ = _backward_tile(
            dy_ptr, x_ptr, None, None, scale, q_ptr, qt_ptr, block * (BLOCK_ROWS // 4), strip * BLOCK_COLS,
            rows, cols, dy_stride, x_stride, t_stride, KIND, GATED, LIMIT, SHIFT, MAX, EVICT,
            BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    else:
        strips = tl.cdiv(cols, BLOCK_COLS)
        split, width = (tl.program_id(0) // strips).to(tl.int64), cols * 2 if GATED else cols
        first_col = (tl.program_id(0) % strips).to(tl.int64) * BLOCK_COLS
        col = first_col + tl.arange(0, BLOCK_COLS)
        gate_bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0)[None, :]
        up_bias = gate_bias
        if GATED:
            up_bias = tl.load(bias_ptr + cols + col, mask=col < cols, other=0.0)[None, :]
        largest = tl.zeros([BLOCK_ROWS // 4, BLOCK_COLS], tl.float32)
        sums = tl.zeros([BLOCK_ROWS // 4, BLOCK_COLS], tl.float32)
        up_sums = tl.zeros([BLOCK_ROWS // 4, BLOCK_COLS], tl.float32)
        for block in tl.range(split, tl.cdiv(rows, BLOCK_ROWS), splits):
            found, sum_0, sum_1 = _backward_tile(
                dy_ptr, x_ptr, gate_bias, up_bias, scale, q_ptr, qt_ptr, block * (BLOCK_ROWS // 4), first_col,
                rows, cols, dy_stride, x_stride, t_stride, KIND, GATED, LIMIT, SHIFT, MAX, EVICT,
                BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            largest = tl.maximum(largest, found)
            sums += sum_0
            up_sums += sum_1
        target = partial_ptr + split * width + col
        tl.store(target, tl.sum(sums, axis=0), mask=col < cols)
        if GATED:
            tl.store(target + cols, tl.sum(up_sums, axis=0), mask=col < cols)
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")
