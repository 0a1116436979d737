"""FlashAttention backward in Triton, in two passes that each add in a fixed order: no atomic additions.

With p the probabilities, kept or dropped and scaled as in forward, and do the gradient of the output:

    delta_i = sum_d do_i o_i                  dp_ij = do_i . v_j
    ds_ij = p_ij (dp_ij - delta_i)            dq_i = scale sum_j ds_ij k_j
    dv_j = sum_i p_ij do_i                    dk_j = scale sum_i ds_ij q_i

The first kernel walks keys for a tile of queries: delta and dq. The second walks, for a tile of keys, the
queries of every head that reads them: dk and dv, summed over the group without expanding it. Both compute
the scores again; that is 7 products instead of the 5 of one pass with atomics, the price of the same bits
each time.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from redline.attention.local.tiles import (
    SIZES,
    blocks,
    draw_of,
    kept,
    load_kept,
    load_tile,
    load_vector,
    place,
    positions_of,
    queries_of_program,
    scores,
    seen,
    span,
    store_tile,
)
from redline.kernels.triton_common import LOG2_E


@triton.jit
def _uncapped(ds, s, softcap, CAPPED: tl.constexpr):
    """Through the cap: its slope is 1 - tanh^2, and s is softcap * tanh in units of log 2."""
    if CAPPED:
        t = s / (softcap * LOG2_E)
        ds = ds * (1.0 - t * t)
    return ds


@triton.jit
def _walk_keys(
    q, do, delta, base, dq, k, v, begin, end, lo, hi, row, position, draw, head,
    k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap, keep_scale,
    MASKED: tl.constexpr, SEGMENTS: tl.constexpr, CAPPED: tl.constexpr, DROP: tl.constexpr,
    QUADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, KEYS):
        k_tile = load_tile(k, first, k_len, k_row, k_at, HEAD_DIM, KEYS, BLOCK_DIM, TMA, WHOLE=not MASKED)
        v_tile = load_tile(v, first, k_len, v_row, v_at, HEAD_DIM, KEYS, BLOCK_DIM, TMA, WHOLE=not MASKED)
        s = scores(tl.dot(q, tl.trans(k_tile), input_precision=PRECISION), scale, softcap, CAPPED)
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        p = tl.exp2(s - base[:, None])
        if MASKED:
            col = first + tl.arange(0, KEYS)
            p = tl.where(seen(lo, hi, col, seg_ptr, row, q_len, k_len, SEGMENTS), p, 0.0)
        if DROP:
            keep = kept(draw, head, position, first, k_len, QUADS, QUERIES, KEYS)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = _uncapped(p * (dp - delta[:, None]), s, softcap, CAPPED)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def attention_dq_kernel(
    q, k, v, out, do, dq_ptr, delta_ptr, base_ptr, lse_ptr, cu_ptr, seg_ptr, key_ptr, iteration_ptr,
    sample_ptr, positions_ptr, q_len, q_padded, k_len, heads, repeat, batch, section, q_tiles, num_docs,
    steps,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, do_row, do_batch, do_head,
    scale, softcap, left, right, threshold, keep_scale, first_head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, DROP: tl.constexpr,
    QUADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [q_len, batch, heads, HEAD_DIM], delta and base [batch, heads, padded]; out is contiguous.

    base is the log-sum-exp in units of log 2. Zeros pad both, so that each head begins on 16 bytes.
    """
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
    position, draw, head = row, (0, 0, 0, 0, 0), first_head + n
    if DROP:
        position = positions_of(positions_ptr, row, q_len)
        draw = draw_of(key_ptr, iteration_ptr, sample_ptr, b, threshold)

    q_tile = load_kept(q, start, q_len, q_row, (b, n, b * q_batch + n * q_head), HEAD_DIM, QUERIES, BLOCK_DIM)
    do_tile = load_kept(
        do, start, q_len, do_row, (b, n, b * do_batch + n * do_head), HEAD_DIM, QUERIES, BLOCK_DIM
    )
    width = batch * heads * HEAD_DIM
    out_tile = load_kept(
        out, start, q_len, width, (b, n, place_of_head * HEAD_DIM), HEAD_DIM, QUERIES, BLOCK_DIM
    )
    delta = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    lse_at = lse_ptr + place_of_head.to(tl.int64) * q_len + row
    base = tl.load(lse_at, mask=row < q_len, other=0.0) * LOG2_E
    padded = place_of_head.to(tl.int64) * q_padded + row
    tl.store(delta_ptr + padded, delta, mask=row < q_padded)
    tl.store(base_ptr + padded, base, mask=row < q_padded)
    dq = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    if LEFT or cu_ptr is not None:
        dq = _walk_keys(
            q_tile, do_tile, delta, base, dq, k, v, begin, full_begin, lo, hi, row, position, draw, head,
            k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap, keep_scale,
            True, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM, BLOCK_DIM, QUERIES, KEYS, TMA,
            PRECISION,
        )  # fmt: skip
    if not SEGMENTS:
        dq = _walk_keys(
            q_tile, do_tile, delta, base, dq, k, v, full_begin, full_end, lo, hi, row, position, draw, head,
            k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap, keep_scale,
            False, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM, BLOCK_DIM, QUERIES, KEYS, TMA,
            PRECISION,
        )  # fmt: skip
    dq = _walk_keys(
        q_tile, do_tile, delta, base, dq, k, v, full_end, end, lo, hi, row, position, draw, head,
        k_len, q_len, k_row, v_row, k_at, v_at, seg_ptr, scale, softcap, keep_scale,
        True, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM, BLOCK_DIM, QUERIES, KEYS, TMA, PRECISION,
    )  # fmt: skip
    store_tile(dq_ptr + place_of_head * HEAD_DIM, start, q_len, width, dq * scale, HEAD_DIM, QUERIES)


@triton.jit
def _walk_queries(
    k, v, dk, dv, q, do, base_source, delta_source, of_head, begin, end, lo, hi, col, positions_ptr, draw,
    head, q_len, k_len, q_row, do_row, q_at, do_at, seg_ptr, scale, softcap, keep_scale,
    MASKED: tl.constexpr, SEGMENTS: tl.constexpr, CAPPED: tl.constexpr, DROP: tl.constexpr,
    QUADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores stand on their side here, [KEYS, QUERIES], as both products that use them read them."""
    for first in range(begin, end, QUERIES):
        row = first + tl.arange(0, QUERIES)
        q_tile = load_tile(q, first, q_len, q_row, q_at, HEAD_DIM, QUERIES, BLOCK_DIM, TMA, WHOLE=not MASKED)
        do_tile = load_tile(
            do, first, q_len, do_row, do_at, HEAD_DIM, QUERIES, BLOCK_DIM, TMA, WHOLE=not MASKED
        )
        base = load_vector(base_source, of_head, first, q_len, QUERIES, TMA)
        delta = load_vector(delta_source, of_head, first, q_len, QUERIES, TMA)
        s = scores(tl.dot(k, tl.trans(q_tile), input_precision=PRECISION), scale, softcap, CAPPED)
        p = tl.exp2(s - base[None, :])
        if MASKED:
            p = tl.where(seen(lo, hi, row, seg_ptr, col, k_len, q_len, SEGMENTS), p, 0.0)
        if DROP:
            position = positions_of(positions_ptr, row, q_len)
            first_col = tl.min(col, 0)
            keep = tl.trans(kept(draw, head, position, first_col, k_len, QUADS, QUERIES, KEYS))
            dropped = tl.where(keep, p * keep_scale, 0.0).to(do_tile.dtype)
        else:
            dropped = p.to(do_tile.dtype)
        dv = tl.dot(dropped, do_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        if DROP:
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = _uncapped(p * (dp - delta[None, :]), s, softcap, CAPPED)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def attention_dkv_kernel(
    q, k, v, do, dk_ptr, dv_ptr, delta_source, base_source, cu_ptr, seg_ptr, key_ptr, iteration_ptr,
    sample_ptr, positions_ptr, q_len, q_padded, k_len, heads, repeat, batch, section, k_tiles, num_docs,
    steps,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, do_row, do_batch, do_head,
    scale, softcap, left, right, threshold, keep_scale, first_head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, DROP: tl.constexpr,
    QUADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv [k_len, batch, groups, HEAD_DIM]; delta comes from the first kernel."""
    SEGMENTS: tl.constexpr = seg_ptr is not None
    tile, place_of_group = place(k_tiles, section, LAST_FIRST=False)
    groups = heads // repeat
    b, g = place_of_group // groups, place_of_group % groups
    start = tile * KEYS
    col = start + tl.arange(0, KEYS)
    lo, hi = span(col, k_len, q_len, cu_ptr, num_docs, steps, right, left, RIGHT, LEFT)
    begin, full_begin, full_end, end = blocks(lo, hi, QUERIES, SEGMENTS)
    if SEGMENTS:
        seg_ptr += b * k_len
    draw = (0, 0, 0, 0, 0)
    if DROP:
        draw = draw_of(key_ptr, iteration_ptr, sample_ptr, b, threshold)
    k_tile = load_kept(k, start, k_len, k_row, (b, g, b * k_batch + g * k_head), HEAD_DIM, KEYS, BLOCK_DIM)
    v_tile = load_kept(v, start, k_len, v_row, (b, g, b * v_batch + g * v_head), HEAD_DIM, KEYS, BLOCK_DIM)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    for n in range(g * repeat, (g + 1) * repeat):
        of_head = (b * heads + n) * q_padded
        q_at, do_at = (b, n, b * q_batch + n * q_head), (b, n, b * do_batch + n * do_head)
        head = first_head + n
        if RIGHT or cu_ptr is not None:
            dk, dv = _walk_queries(
                k_tile, v_tile, dk, dv, q, do, base_source, delta_source, of_head, begin, full_begin,
                lo, hi, col, positions_ptr, draw, head, q_len, k_len, q_row, do_row, q_at, do_at,
                seg_ptr, scale, softcap, keep_scale, True, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM,
                BLOCK_DIM, QUERIES, KEYS, TMA, PRECISION,
            )  # fmt: skip
        if not SEGMENTS:
            dk, dv = _walk_queries(
                k_tile, v_tile, dk, dv, q, do, base_source, delta_source, of_head, full_begin, full_end,
                lo, hi, col, positions_ptr, draw, head, q_len, k_len, q_row, do_row, q_at, do_at,
                seg_ptr, scale, softcap, keep_scale, False, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM,
                BLOCK_DIM, QUERIES, KEYS, TMA, PRECISION,
            )  # fmt: skip
        dk, dv = _walk_queries(
            k_tile, v_tile, dk, dv, q, do, base_source, delta_source, of_head, full_end, end,
            lo, hi, col, positions_ptr, draw, head, q_len, k_len, q_row, do_row, q_at, do_at,
            seg_ptr, scale, softcap, keep_scale, True, SEGMENTS, CAPPED, DROP, QUADS, HEAD_DIM,
            BLOCK_DIM, QUERIES, KEYS, TMA, PRECISION,
        )  # fmt: skip
    width = batch * groups * HEAD_DIM
    store_tile(dk_ptr + place_of_group * HEAD_DIM, start, k_len, width, dk * scale, HEAD_DIM, KEYS)
    store_tile(dv_ptr + place_of_group * HEAD_DIM, start, k_len, width, dv, HEAD_DIM, KEYS)
