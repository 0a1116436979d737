"""Embedding in Triton: a gather forward, a sum over sorted runs backward.

Backward: the ids are sorted stably, so that equal ids keep the order of their tokens. The program at the
head of a run of equal ids adds the run's gradient rows in fp32, the first alone, then 8 at a time, and then
the sum to the row of main_grad; the programs inside a run end at once. One program writes a row: no atomics,
one fixed order.
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

GATHER_BLOCK = 4096  # columns a program: 64 bytes a thread of bf16
# 8 columns a thread of 4 warps: 16-byte loads of bf16. Most runs of a token are short: on an H200 4 rows a
# step take 285 us, 8 take 303, 16 take 317; blocks of 512 to 2048 columns are within 2%.
RUN_ROWS, RUN_BLOCK = 4, 1024
# Up to so many tokens one launch that compares each with each (2.7e8 times) is shorter than the 15 of a radix
# sort, which take 60 us on an H200.
RANK_TOKENS = 16384
RANK_ROWS, RANK_COLS = 16, 256
MANY = tl.constexpr(1 << 30)  # above every id of a vocabulary


@triton.jit
def _row(ids_ptr, weight_ptr, token, weight_stride, start, num_rows, vocab_size, column, mask):
    identity = tl.load(ids_ptr + token).to(tl.int64)
    local = identity - start
    here = (local >= 0) & (local < num_rows)
    x = tl.load(weight_ptr + local * weight_stride + column, mask=mask & here, other=0.0).to(tl.float32)
    return tl.where((identity >= 0) & (identity < vocab_size), x, float("nan"))


@launchable
@triton.jit
def _gather_kernel(
    tokens_ptr, weight_ptr, positions_ptr, position_weight_ptr, out_ptr, weight_stride, position_stride,
    hidden, start, num_rows, vocab_size, num_positions, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(hidden, BLOCK)  # those of a row follow one another
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    x = _row(tokens_ptr, weight_ptr, token, weight_stride, start, num_rows, vocab_size, column, mask)
    if POSITIONS:
        x += _row(
            positions_ptr, position_weight_ptr, token, position_stride, 0, num_positions, num_positions,
            column, mask,
        )  # fmt: skip
    tl.store(out_ptr + token * hidden + column, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _ids(ids_ptr, place, num_tokens):
    """Ids at these places as int32 whose differences do not overflow; none has an id above all."""
    identity = tl.load(ids_ptr + place, mask=place < num_tokens, other=MANY).to(tl.int32)
    return tl.minimum(tl.maximum(identity, -1), MANY)


@triton.jit
def _below(other, limit):
    """1 where other < limit: the sign of their difference, which is an instruction less than to compare."""
    return (other - limit).to(tl.uint32, bitcast=True) >> 31


@launchable
@triton.jit
def _rank_kernel(ids_ptr, sorted_ptr, order_ptr, num_tokens, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sort stably by counting: a token's place is the number of tokens that come before it."""
    first = tl.program_id(0) * ROWS
    place = first + tl.arange(0, ROWS)
    identity = _ids(ids_ptr, place, num_tokens)
    own = identity[:, None]
    lane = tl.arange(0, COLS)
    # Of tokens before these an equal id counts too, of those after them not, of those around them if earlier.
    here = first // COLS * COLS
    limit = own + ((here + lane)[None, :] < place[:, None]).to(tl.int32)
    before = _below(_ids(ids_ptr, here + lane, num_tokens)[None, :], limit)
    for start in range(0, here, COLS):
        before += _below(_ids(ids_ptr, start + lane, num_tokens)[None, :], own + 1)
    for start in range(here + COLS, num_tokens, COLS):
        before += _below(_ids(ids_ptr, start + lane, num_tokens)[None, :], own)
    rank = tl.sum(before, axis=1).to(tl.int32)
    tl.store(sorted_ptr + rank, identity, mask=place < num_tokens)
    tl.store(order_ptr + rank, place.to(tl.int64), mask=place < num_tokens)


@triton.jit
def _run_rows(sorted_ptr, order_ptr, place, num_tokens, identity, wanted):
    """Which of the sorted places belong to the run of `identity`, and the rows of dout they stand for."""
    inside = (place < num_tokens) & wanted
    same = inside & (tl.load(sorted_ptr + place, mask=inside, other=-1) == identity)
    return same, tl.load(order_ptr + place, mask=inside, other=0)


@launchable
@triton.jit
def _run_kernel(
    sorted_ptr, order_ptr, dout_ptr, main_grad_ptr, num_tokens, hidden, dout_stride, start, num_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Most runs have one row, so the first row's way is short: ids and place together, then both rows."""
    blocks = tl.cdiv(hidden, BLOCK)
    head = tl.program_id(0) // blocks
    identity = tl.load(sorted_ptr + head)
    previous = tl.load(sorted_ptr + head - 1, mask=head > 0, other=-1)
    following = tl.load(sorted_ptr + head + 1, mask=head + 1 < num_tokens, other=-1)
    row = tl.load(order_ptr + head)
    local = identity.to(tl.int64) - start
    is_head = (head == 0) | (identity != previous)
    if is_head & (local >= 0) & (local < num_rows):
        column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = column < hidden
        out_ptr = main_grad_ptr + local * hidden + column
        grad = tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(dout_ptr + row * dout_stride + column, mask=mask, other=0.0).to(tl.float32)
        place = head + 1 + tl.arange(0, ROWS)
        same, rows = _run_rows(sorted_ptr, order_ptr, place, num_tokens, identity, following == identity)
        more = following == identity
        while more:  # places are fetched a step ahead, so that a step waits for memory once
            dout_ptrs = dout_ptr + rows[:, None] * dout_stride + column[None, :]
            found = tl.load(dout_ptrs, mask=same[:, None] & mask[None, :], other=0.0)
            more = tl.sum(same.to(tl.int32), axis=0) == ROWS
            place += ROWS
            same, rows = _run_rows(sorted_ptr, order_ptr, place, num_tokens, identity, more)
            total += tl.sum(found.to(tl.float32), axis=0)
        tl.store(out_ptr, (grad + total).to(main_grad_ptr.dtype.element_ty), mask=mask)


def gather(
    tokens: Tensor, weight_VH: Tensor, positions: Tensor | None, position_weight_PH: Tensor | None,
    vocab_start: int, vocab_size: int,
) -> Tensor:  # fmt: skip
    """[*tokens.shape, H] in the weight's dtype. Ids contiguous, weights with unit column stride."""
    rows, hidden = weight_VH.shape
    out = torch.empty((*tokens.shape, hidden), dtype=weight_VH.dtype, device=weight_VH.device)
    if out.numel():
        block = min(GATHER_BLOCK, next_power_of_2(hidden))
        position_stride, num_positions = 0, 0
        if position_weight_PH is not None:
            position_stride, num_positions = position_weight_PH.stride(0), len(position_weight_PH)
        with on_device_of(out):
            _gather_kernel[(tokens.numel() * ceil_div(hidden, block),)](
                tokens, weight_VH, positions, position_weight_PH, out, weight_VH.stride(0),
                position_stride, hidden, vocab_start, rows, vocab_size, num_positions,
                POSITIONS=positions is not None, BLOCK=block, num_warps=max(1, min(4, block // 256)),
            )  # fmt: skip
    return out


def _sorted(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(ids in order as int32, the places they had) of at least one id; equal ids keep their order."""
    ids = ids.reshape(-1)
    tokens = len(ids)
    if tokens > RANK_TOKENS:
        found: tuple[Tensor, Tensor] = ids.to(torch.int32).sort(stable=True)
        return found
    sorted_T, order_T = torch.empty_like(ids, dtype=torch.int32), torch.empty_like(ids, dtype=torch.int64)
    _rank_kernel[(ceil_div(tokens, RANK_ROWS),)](
        ids, sorted_T, order_T, tokens, ROWS=RANK_ROWS, COLS=RANK_COLS, num_warps=4
    )
    return sorted_T, order_T


def accumulate(main_grad_VH: Tensor, ids: Tensor, dout_TH: Tensor, vocab_start: int, vocab_size: int) -> None:
    """main_grad[id - start] += the rows of dout with that id. dout has unit column stride."""
    tokens, hidden = dout_TH.shape
    if dout_TH.numel() == 0:
        return
    block = min(RUN_BLOCK, next_power_of_2(hidden))
    with on_device_of(dout_TH):
        sorted_T, order_T = _sorted(ids)
        _run_kernel[(tokens * ceil_div(hidden, block),)](
            sorted_T, order_T, dout_TH, main_grad_VH, tokens, hidden, dout_TH.stride(0), vocab_start,
            min(len(main_grad_VH), vocab_size - vocab_start),
            ROWS=RUN_ROWS, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
