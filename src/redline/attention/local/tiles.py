"""What the three attention kernels share: where a program works, what a row sees, how a tile is fetched.

Every mask but segments is an interval: query i sees the keys from lo_i up to hi_i, and key j is seen by the
queries of such an interval too. Document, causal limit, window and length only move its ends, both of which
rise with the row. So a tile of rows has blocks where every row sees every column, and no mask is computed
there, between blocks at both ends where it is.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from redline.kernels.triton_common import LOG2_E, philox_words

LN2 = tl.constexpr(0.6931471805599453)
# Numbers that change from batch to batch: kernels compiled for "is 1" or "is a multiple of 16" gain nothing.
SIZES = (
    "q_len", "q_padded", "k_len", "heads", "batch", "section", "q_tiles", "k_tiles", "num_docs", "steps",
    "first_head",
)  # fmt: skip


@triton.jit
def place(tiles, section, LAST_FIRST: tl.constexpr):
    """(tile, head) of this program: heads of a section side by side, the heaviest tiles first."""
    pid = tl.program_id(0)
    inside = pid % (section * tiles)
    tile = inside // section
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, pid // (section * tiles) * section + inside % section


@triton.jit
def span(row, rows, cols, cu_ptr, num_docs, steps, before, after, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """The first column that each row meets, and the one past the last. Rows outside count as the last one.

    Args:
        before, after: how far it looks, where BEFORE and AFTER say that there is a limit.
        cu_ptr: ends of documents [num_docs + 1], None where nothing is packed.
        steps: of the binary search among them.
    """
    row = tl.minimum(row, rows - 1)
    lo = row * 0
    hi = lo + cols
    if cu_ptr is not None:
        first, last = lo, lo + num_docs + 1  # the first entry above the row lies in [first, last]
        for _ in range(steps):
            middle = (first + last) // 2
            inside = first < last
            under = tl.load(cu_ptr + middle, mask=inside, other=0) <= row
            first = tl.where(inside & under, middle + 1, first)
            last = tl.where(inside & ~under, middle, last)
        lo = tl.load(cu_ptr + first - 1)
        hi = tl.load(cu_ptr + tl.minimum(first, num_docs))  # after the last document: nothing
    if BEFORE:
        lo = tl.maximum(lo, row - before)
    if AFTER:
        hi = tl.minimum(hi, row + after + 1)
    return lo, hi


@triton.jit
def blocks(lo, hi, BLOCK: tl.constexpr, ALL_MASKED: tl.constexpr):
    """(begin, full_begin, full_end, end) of the columns that a tile of rows walks, in steps of BLOCK.

    Between full_begin and full_end every row meets every column.
    """
    begin = tl.min(lo, 0) // BLOCK * BLOCK
    end = tl.max(hi, 0)
    full_begin = tl.cdiv(tl.max(lo, 0), BLOCK) * BLOCK
    full_end = tl.min(hi, 0) // BLOCK * BLOCK
    if ALL_MASKED:
        full_end = begin
    none = full_end <= full_begin
    return begin, tl.where(none, begin, full_begin), tl.where(none, begin, full_end), end


@triton.jit
def queries_of_program(
    q_tiles, section, q_len, k_len, cu_ptr, num_docs, steps, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SEGMENTS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Where a program that takes a tile of queries works, and the keys that they see.

    Returns: the place of its head among those of all samples, its first row, its rows, `span`, `blocks`.
    """
    tile, place_of_head = place(q_tiles, section, LAST_FIRST=RIGHT)
    start = tile * QUERIES
    row = start + tl.arange(0, QUERIES)
    lo, hi = span(row, q_len, k_len, cu_ptr, num_docs, steps, left, right, LEFT, RIGHT)
    begin, full_begin, full_end, end = blocks(lo, hi, KEYS, SEGMENTS)
    return place_of_head, start, row, lo, hi, begin, full_begin, full_end, end


@triton.jit
def load_tile(
    source, row, rows, stride, at,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
    TMA: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of one head, zeros outside: by a descriptor of [S, B, N, D], or from a pointer.

    Tiles that a loop fetches come by descriptor. One that stays comes from a pointer: by descriptor, Triton
    3.6 holds it in registers; a pointer's goes to shared memory, from which the tensor cores read it.

    Args:
        at: the sample, the head, and how many elements after the pointer that head's first row begins.
    """
    batch, head, offset = at
    if TMA:
        tile = tl.reshape(source.load([row, batch, head, 0]), [BLOCK, BLOCK_DIM])
    else:
        r = row + tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_DIM)
        where = source + offset + r.to(tl.int64)[:, None] * stride + d[None, :]
        if WHOLE and HEAD_DIM == BLOCK_DIM:
            tile = tl.load(where)
        else:
            tile = tl.load(where, mask=(r < rows)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_kept(
    source, row, rows, stride, at, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """The tile that a program keeps while it walks the others."""
    return load_tile(source, row, rows, stride, at, HEAD_DIM, BLOCK, BLOCK_DIM, TMA=False, WHOLE=False)


@triton.jit
def load_vector(source, of_head, row, rows, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """One number a row, from `of_head` on in the array of all heads. Past the last row: anything finite.

    By descriptor it costs no registers for addresses, of which every thread would hold one a number.
    """
    if TMA:
        x = source.load([of_head + row])
    else:
        r = row + tl.arange(0, BLOCK)
        x = tl.load(source + tl.cast(of_head, tl.int64) + r, mask=r < rows, other=0.0)
    return x


@triton.jit
def store_tile(target, row, rows, stride, tile, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Write a tile's rows that exist, from the pointer to the head's first row."""
    r = row + tl.arange(0, BLOCK)
    d = tl.arange(0, tile.shape[1])
    at = target + r.to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(at, tile.to(target.dtype.element_ty), mask=(r < rows)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def scores(products, scale, softcap, CAPPED: tl.constexpr):
    """Scaled and capped scores in units of log 2, so that exp2 takes them as they are.

    tanh(x) is 1 - 2 / (e^2x + 1): right at both ends, and off by 1e-7 of the cap in between.
    """
    if CAPPED:
        s = softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(products * (2.0 * LOG2_E * scale / softcap)) + 1.0))
    else:
        s = products * (scale * LOG2_E)
    return s


@triton.jit
def seen(lo, hi, col, seg_ptr, row, rows, cols, SEGMENTS: tl.constexpr):
    """[rows, cols]: whether each row of the tile meets each column."""
    visible = (col[None, :] >= lo[:, None]) & (col[None, :] < hi[:, None])
    if SEGMENTS:
        of_row = tl.load(seg_ptr + row, mask=row < rows, other=-1)
        of_col = tl.load(seg_ptr + col, mask=col < cols, other=-1)
        visible &= (of_row[:, None] == of_col[None, :]) & (of_row >= 0)[:, None]
    return visible


@triton.jit
def kept(
    draw, head, position, first_col, cols,
    QUADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Which probabilities survive dropout; the counter is the place in the whole sample's [N, T, T].

    Args:
        draw: the two key words, the iteration, the sample's number and the threshold.
        position: of each query in its whole sample.
        cols: T. Where it is a multiple of 4 (QUADS), one call of Philox serves 4 neighbours.
    """
    k0, k1, iteration, sample, threshold = draw
    row = head.to(tl.int64) * cols + position
    if QUADS:
        quad = first_col // 4 + tl.arange(0, BLOCK_COLS // 4)
        block = (row * (cols // 4))[:, None] + quad[None, :]
        w0, w1, w2, w3 = philox_words(k0, k1, iteration, sample, block)
        # A join puts its two sides next to each other in one thread: no word moves between threads.
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK_ROWS, BLOCK_COLS])
    else:
        element = (row * cols)[:, None] + (first_col + tl.arange(0, BLOCK_COLS))[None, :]
        w0, w1, w2, w3 = philox_words(k0, k1, iteration, sample, element >> 2)
        index = element & 3
        word = tl.where(index < 2, tl.where(index == 0, w0, w1), tl.where(index == 2, w2, w3))
    return word >= threshold


@triton.jit
def draw_of(key_ptr, iteration_ptr, sample_ptr, batch, threshold):
    """What all draws of a program share, read once."""
    k0, k1 = tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32)
    iteration = tl.load(iteration_ptr).to(tl.uint32)
    return k0, k1, iteration, tl.load(sample_ptr + batch).to(tl.uint32), threshold


@triton.jit
def positions_of(positions_ptr, row, rows):
    """The place of each query in its whole sample."""
    position = row.to(tl.int64)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row, mask=row < rows, other=0)
    return position
