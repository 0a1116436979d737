"""Embedding in Triton: a gather forward, a sum over sorted runs backward.

Backward: the ids are sorted stably, so that equal ids keep the order of their tokens: into entries, an id
with the place of its token. The program at the head of a run of equal ids adds the run's gradient rows in
fp32, a few at a time, the first one last, and then the sum to the row of main_grad; the programs inside a
run end at once. One program writes a row: no atomics, one fixed order.

The tiles of a row are counted by constants: loads would wait for the instructions of a division.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import ceil_div, next_power_of_2, on_device_of
from redline.kernels.launch import launchable

# 64 bytes a thread of bf16. On an H200 other shapes take up to 3% longer (with positions 17 to 37), masks 1;
# to have what is read or written evicted first costs 2 to 10%, to ask the L2 cache for more around it 0.5.
# Programs that stay and fetch the next rows ahead, in shared memory or registers, take 5 to 10% longer.
GATHER_ROWS, GATHER_BLOCK, GATHER_WARPS = 2, 1024, 2
# Most runs of a token are short: 8 rows a step take 5% longer on an H200, one row 1% less, but a run of many
# waits for memory as often. 8 or 16 columns a thread, 512 to 4096 a program are within 3%.
RUN_ROWS, RUN_BLOCK, RUN_COLUMNS = 2, 2048, 16
# Two launches sort the tokens: tiles of them by counting, then each looks for its place in the other tiles.
# Beyond so many that is more work than a radix sort, whose 15 launches take 60 us on an H200.
RANK_TOKENS = 65536
RANK_TILE, RANK_ROWS = 1024, 16  # powers of two, as the next ones; rows of a program lie in one tile
MERGE_ROWS, MERGE_TILES = 32, 16
LOWER = tl.constexpr((1 << 32) - 1)  # the place in an entry; the upper half is the id


@triton.jit
def _rows(ids_ptr, weight_ptr, place, inside, weight_stride, start, num_rows, vocab_size, column, mask):
    """What the ids at these places look up, as it is stored: [places, columns]. No `mask`: all are there.

    Then an id that has no row here reads the first one in vain: there is one, and the load waits for no mask.
    """
    other = None if mask is None else 0
    identity = tl.load(ids_ptr + place, mask=inside, other=other).to(tl.int64)[:, None]
    local = identity - start
    known = (identity >= 0) & (identity < vocab_size)
    here = known & (local >= 0) & (local < num_rows)
    if mask is not None:
        mask = mask & here
    x_ptr = weight_ptr + tl.where(here, local, 0) * weight_stride + column
    x = tl.load(x_ptr, mask=mask, other=other)
    return tl.where(here, x, tl.where(known, 0.0, float("nan")).to(x.dtype))


@launchable
@triton.jit
def _gather_kernel(
    tokens_ptr, weight_ptr, positions_ptr, position_weight_ptr, out_ptr, num_tokens, weight_stride,
    position_stride, hidden, start, num_rows, vocab_size, num_positions, batch, positions_s, positions_b,
    POSITIONS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """WHOLE: every tile has all its tokens and columns. The BLOCKS of a row follow one another.

    Positions [S, batch] may have any strides: they are often one column, seen by every sequence.
    """
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside, mask = None, None
    if not WHOLE:
        inside = token < num_tokens
        mask = inside[:, None] & (column < hidden)
    x = _rows(tokens_ptr, weight_ptr, token, inside, weight_stride, start, num_rows, vocab_size, column, mask)
    if POSITIONS:
        place = token // batch * positions_s + token % batch * positions_b
        position = _rows(
            positions_ptr, position_weight_ptr, place, inside, position_stride, 0, num_positions,
            num_positions, column, mask,
        )  # fmt: skip
        x = x.to(tl.float32) + position.to(tl.float32)
    out_ptr += token[:, None] * hidden + column
    tl.store(out_ptr, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _keys(ids_ptr, place, num_tokens, TILE: tl.constexpr):
    """id * TILE + place in the tile: as the ids with equal ones in order, and no two are equal.

    Ids that are negative or too large, and those of no token, are the largest that a key holds.
    """
    LAST: tl.constexpr = (1 << 31) // TILE - 1
    identity = tl.load(ids_ptr + place, mask=place < num_tokens, other=LAST).to(tl.int64)
    return tl.minimum(identity.to(tl.uint64, bitcast=True), LAST).to(tl.int32) * TILE + place % TILE


@launchable
@triton.jit
def _sort_tiles_kernel(ids_ptr, keys_ptr, num_tokens, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Sort the keys of each tile by counting: a key's place is the number of those below it."""
    first = tl.program_id(0) * ROWS
    tile = first // TILE * TILE
    own = _keys(ids_ptr, first + tl.arange(0, ROWS), num_tokens, TILE)
    other = _keys(ids_ptr, tile + tl.arange(0, TILE), num_tokens, TILE)
    # the sign of the difference, which is an instruction less than to compare; keys are from 0 to 2^31 - 1
    below = (other[None, :] - own[:, None]).to(tl.uint32, bitcast=True) >> 31
    rank = tile + tl.sum(below.to(tl.int32), axis=1)
    tl.store(keys_ptr + rank, own, mask=rank < num_tokens)


@triton.jit
def _probed(keys_ptr, place, num_tokens, last, STEP: tl.constexpr):
    """STEP where that many more keys from `place` on are at most `last`, else 0."""
    probe = place + (STEP - 1)
    inside = probe < num_tokens
    key = tl.load(keys_ptr + probe, mask=inside, other=0)
    return tl.where(inside & (key <= last), STEP, 0)


@launchable
@triton.jit
def _merge_tiles_kernel(
    keys_ptr, entries_ptr, num_tokens,
    TILE: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Of each key of a sorted tile, count by bisection what comes before it in the others; TILE is 2^STEPS.

    The keys of a warp are neighbours in order, so that it finds them in few lines of another tile.
    """
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = position < num_tokens
    key = tl.load(keys_ptr + position, mask=mask, other=0)
    own = tl.program_id(0) * ROWS // TILE
    rank = position - own * TILE
    least = key // TILE * TILE  # of all keys with this id
    for first in range(0, tl.cdiv(num_tokens, TILE), TILES):
        tile = (first + tl.arange(0, TILES))[None, :]
        # Equal ids of earlier tiles come before. Those of its own tile are counted: no key is below 0.
        last = tl.where(tile == own, -1, least[:, None] + tl.where(tile < own, TILE - 1, -1))
        found = tl.zeros((ROWS, TILES), tl.int32)
        for index in tl.static_range(STEPS + 1):
            found += _probed(keys_ptr, tile * TILE + found, num_tokens, last, max(TILE >> (index + 1), 1))
        rank += tl.sum(found, axis=1)
    entry = ((key // TILE).to(tl.int64) << 32) | (own * TILE + key % TILE)
    tl.store(entries_ptr + rank, entry, mask=mask)


@triton.jit
def _run_rows(entries_ptr, place, num_tokens, identity, wanted):
    """Which of these places belong to the run of `identity`, and the rows of dout they stand for."""
    inside = (place < num_tokens) & wanted
    entry = tl.load(entries_ptr + place, mask=inside, other=0)
    return inside & (entry >> 32 == identity), entry & LOWER


@launchable
@triton.jit
def _run_kernel(
    entries_ptr, dout_ptr, main_grad_ptr, num_tokens, hidden, dout_stride, start, num_rows,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Most runs have one row, so its way is short: one load says id and place, the next ones are both rows.

    The run's other rows come first, in a loop that needs its registers alone.
    """
    head = tl.program_id(0) // BLOCKS
    entry = tl.load(entries_ptr + head)
    identity = entry >> 32
    previous = tl.load(entries_ptr + head - 1, mask=head > 0, other=-1) >> 32
    following = tl.load(entries_ptr + head + 1, mask=head + 1 < num_tokens, other=-1) >> 32
    local = identity - start
    is_head = (head == 0) | (identity != previous)
    if is_head & (local >= 0) & (local < num_rows):
        column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        mask = column < hidden
        total = tl.zeros((BLOCK,), tl.float32)
        more = following == identity
        place = head + 1 + tl.arange(0, ROWS)
        same, rows = _run_rows(entries_ptr, place, num_tokens, identity, more)
        while more:  # places are fetched a step ahead, so that a step waits for memory once
            dout_ptrs = dout_ptr + rows[:, None] * dout_stride + column[None, :]
            found = tl.load(dout_ptrs, mask=same[:, None] & mask[None, :], other=0.0)
            more = tl.sum(same.to(tl.int32), axis=0) == ROWS
            place += ROWS
            same, rows = _run_rows(entries_ptr, place, num_tokens, identity, more)
            total += tl.sum(found.to(tl.float32), axis=0)
        first_ptr = dout_ptr + (entry & LOWER) * dout_stride + column
        out_ptr = main_grad_ptr + local * hidden + column
        total += tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr, total.to(main_grad_ptr.dtype.element_ty), mask=mask)


def gather(
    tokens: Tensor, weight_VH: Tensor, positions: Tensor | None, position_weight_PH: Tensor | None,
    vocab_start: int, vocab_size: int,
) -> Tensor:  # fmt: skip
    """[*tokens.shape, H] in the weight's dtype. Tokens contiguous, weights with unit column stride."""
    rows, hidden = weight_VH.shape
    out = weight_VH.new_empty(*tokens.shape, hidden)
    if out.numel() == 0:
        return out
    block = min(GATHER_BLOCK, next_power_of_2(hidden))
    blocks = ceil_div(hidden, block)
    whole = rows > 0 and tokens.numel() % GATHER_ROWS == 0 and hidden % block == 0
    num_positions, position_stride, batch, strides, warps = 0, 0, 1, (0, 0), GATHER_WARPS
    if positions is not None and position_weight_PH is not None:
        warps *= 2  # as many bytes a thread, of two rows
        if positions.dim() != 2:
            positions = positions.reshape(-1, 1)
        num_positions, position_stride = len(position_weight_PH), position_weight_PH.stride(0)
        batch, strides = positions.shape[1], (positions.stride(0), positions.stride(1))
        whole = whole and num_positions > 0
    with on_device_of(out):
        _gather_kernel[(ceil_div(tokens.numel(), GATHER_ROWS) * blocks,)](
            tokens, weight_VH, positions, position_weight_PH, out, tokens.numel(), weight_VH.stride(0),
            position_stride, hidden, vocab_start, rows, vocab_size, num_positions, batch, *strides,
            POSITIONS=positions is not None, WHOLE=whole, ROWS=GATHER_ROWS, BLOCKS=blocks, BLOCK=block,
            num_warps=max(1, warps * block // GATHER_BLOCK),
        )  # fmt: skip
    return out


def _sorted(ids: Tensor, vocab_size: int) -> Tensor:
    """Entries (id << 32 | place), in order, of at least one id; equal ids keep their order.

    An id that the vocabulary does not hold comes first or last, perhaps as another that it does not hold.
    """
    ids = ids.reshape(-1).contiguous()  # of strided ids a view may come out of the first
    tokens = len(ids)
    if tokens > RANK_TOKENS or vocab_size * RANK_TILE >= 2**31:
        in_order, places = ids.long().clamp(-1, vocab_size).to(torch.int32).sort(stable=True)
        return (in_order.long() << 32) | places
    keys_T = torch.empty_like(ids, dtype=torch.int32)
    entries_T = torch.empty_like(ids, dtype=torch.int64)
    _sort_tiles_kernel[(ceil_div(tokens, RANK_ROWS),)](
        ids, keys_T, tokens, TILE=RANK_TILE, ROWS=RANK_ROWS, num_warps=4
    )
    _merge_tiles_kernel[(ceil_div(tokens, MERGE_ROWS),)](
        keys_T, entries_T, tokens,
        TILE=RANK_TILE, STEPS=RANK_TILE.bit_length() - 1, ROWS=MERGE_ROWS, TILES=MERGE_TILES, num_warps=4,
    )  # fmt: skip
    return entries_T


def accumulate(main_grad_VH: Tensor, ids: Tensor, dout_TH: Tensor, vocab_start: int, vocab_size: int) -> None:
    """main_grad[id - start] += the rows of dout with that id. dout has unit column stride."""
    tokens, hidden = dout_TH.shape
    if dout_TH.numel() == 0:
        return
    block = min(RUN_BLOCK, next_power_of_2(hidden))
    blocks = ceil_div(hidden, block)
    with on_device_of(dout_TH):
        entries_T = _sorted(ids, vocab_size)
        _run_kernel[(tokens * blocks,)](
            entries_T, dout_TH, main_grad_VH, tokens, hidden, dout_TH.stride(0), vocab_start,
            min(len(main_grad_VH), vocab_size - vocab_start),
            ROWS=RUN_ROWS, BLOCKS=blocks, BLOCK=block, num_warps=max(1, block // (32 * RUN_COLUMNS)),
        )  # fmt: skip
