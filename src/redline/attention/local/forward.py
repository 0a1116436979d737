"""FlashAttention forward in Triton: a program takes a tile of queries of one head through the keys it sees.

Dao 2023, "FlashAttention-2", arXiv 2307.08691, with the online softmax of Milakov and Gimelshein 2018 (arXiv
1805.02867) in base 2. Queries lie as [S, B, N, D] with any strides but the last: nothing is copied before.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from redline.attention.local.tiles import (
    LN2,
    SIZES,
    draw_of,
    kept,
    load_kept,
    load_tile,
    positions_of,
    queries_of_program,
    scores,
    seen,
    store_tile,
)
from redline.kernels.triton_common import LOG2_E


@triton.jit
def _attend(
    q, acc, total, peak, k, v, begin, end, lo, hi, row, position, draw, head,
    k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap,
    MASKED: tl.constexpr, SEGMENTS: tl.constexpr, CAPPED: tl.constexpr, DROP: tl.constexpr,
    QUADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys of [begin, end) into the running output, sum and maximum of each query."""
    for first in range(begin, end, KEYS):
        k_tile = load_tile(k, first, k_len, k_row, k_at, HEAD_DIM, KEYS, BLOCK_DIM, TMA, WHOLE=not MASKED)
        products = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED or CAPPED:
            s = scores(products, scale, softcap, CAPPED)
            if MASKED:
                col = first + tl.arange(0, KEYS)
                s = tl.where(seen(lo, hi, col, seg_ptr, row, q_len, k_len, SEGMENTS), s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(s, 1))
            # A query that has seen nothing yet has a peak of -inf, and exp2(-inf - -inf) would be NaN.
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
            p = tl.exp2(s - base[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(products, 1) * (scale * LOG2_E))
            base = new_peak
            p = tl.exp2(products * (scale * LOG2_E) - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if DROP:
            p = tl.where(kept(draw, head, position, first, k_len, QUADS, QUERIES, KEYS), p, 0.0)
        v_tile = load_tile(v, first, k_len, v_row, v_at, HEAD_DIM, KEYS, BLOCK_DIM, TMA, WHOLE=not MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=SIZES)
def attention_forward_kernel(
    q, k, v, out_ptr, lse_ptr, cu_ptr, seg_ptr, sink_ptr, key_ptr, iteration_ptr, sample_ptr, positions_ptr,
    q_len, k_len, heads, repeat, batch, section, q_tiles, num_docs, steps,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    scale, softcap, left, right, threshold, keep_scale, first_head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, DROP: tl.constexpr,
    QUADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [q_len, batch, heads, HEAD_DIM] and lse [batch, heads, q_len]."""
    SEGMENTS: tl.constexpr = seg_ptr is not None
    place_of_head, start, row, lo, hi, begin, full_begin, full_end, end = queries_of_program(
        q_tiles, section, q_len, k_len, cu_ptr, num_docs, steps, left, right,
        LEFT, RIGHT, SEGMENTS, QUERIES, KEYS,
    )  # fmt: skip
    b, n = place_of_head // heads, place_of_head % heads
    g = n // repeat
    k_at, v_at = (b, g, b * k_batch + g * k_head), (b, g, b * v_batch + g * v_head)
    if SEGMENTS:
        seg_ptr += b * k_len
    position, draw = row, (0, 0, 0, 0, 0)
    if DROP:
        position = positions_of(positions_ptr, row, q_len)
        draw = draw_of(key_ptr, iteration_ptr, sample_ptr, b, threshold)

    q_tile = load_kept(q, start, q_len, q_row, (b, n, b * q_batch + n * q_head), HEAD_DIM, QUERIES, BLOCK_DIM)
    acc = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    if sink_ptr is not None:
        peak = tl.zeros([QUERIES], tl.float32) + tl.load(sink_ptr + n).to(tl.float32) * LOG2_E
        total = tl.zeros([QUERIES], tl.float32) + 1.0
    else:
        peak = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
    head = first_head + n
    if LEFT or cu_ptr is not None:
        acc, total, peak = _attend(
            q_tile, acc, total, peak, k, v, begin, full_begin, lo, hi, row, position, draw, head,
            k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap,
            True, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM, BLOCK_DIM, QUERIES, KEYS, TMA,
            PRECISION,
        )  # fmt: skip
    if not SEGMENTS:
        acc, total, peak = _attend(
            q_tile, acc, total, peak, k, v, full_begin, full_end, lo, hi, row, position, draw, head,
            k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap,
            False, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM, BLOCK_DIM, QUERIES, KEYS, TMA,
            PRECISION,
        )  # fmt: skip
    acc, total, peak = _attend(
        q_tile, acc, total, peak, k, v, full_end, end, lo, hi, row, position, draw, head,
        k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap,
        True, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM, BLOCK_DIM, QUERIES, KEYS, TMA,
            PRECISION,
    )  # fmt: skip

    seen_some = total > 0.0
    rate = tl.where(seen_some, keep_scale / tl.where(seen_some, total, 1.0), 0.0)
    width = batch * heads * HEAD_DIM
    store_tile(
        out_ptr + place_of_head * HEAD_DIM, start, q_len, width, acc * rate[:, None], HEAD_DIM, QUERIES
    )
    lse = tl.where(seen_some, (peak + tl.log2(tl.where(seen_some, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse_ptr + place_of_head.to(tl.int64) * q_len + row, lse, mask=row < q_len)
