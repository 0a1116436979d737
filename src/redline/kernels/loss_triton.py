"""Device functions of the token loss (loss_spec.py), compiled into the kernels of the two loss rooms.

A row is walked as tiles of [LANES, WIDTH] columns, WIDTH neighbours being one 16-byte load of one thread.
The running maximum and sum of the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) are kept
per lane, so the loop has no exchange between threads and takes 1 + 1/WIDTH exponentials an element: with two
an element the GPU's exponential unit (16 a clock and multiprocessor) would be slower than its memory.

Loads are masked by the stored width of a row and compared with the true vocabulary afterwards: a stored width
that is a multiple of 16 keeps its loads vectorised whatever the vocabulary is.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from redline.kernels.common import ceil_div, next_power_of_2
from redline.kernels.triton_common import LOG2_E


@dataclass(frozen=True, slots=True)
class RowTiles:
    """How one program walks a row: LANES x WIDTH columns at a time, by num_warps warps."""

    lanes: int
    width: int
    num_warps: int


@functools.cache
def row_tiles(num_columns: int, dtype: torch.dtype, max_warps: int) -> RowTiles:
    """16 bytes a load, four loads in flight a thread, and no more warps than the row can feed."""
    width = 16 // dtype.itemsize
    lanes = min(next_power_of_2(ceil_div(num_columns, width)), max_warps * 32 * 4)
    return RowTiles(lanes, width, max(1, min(max_warps, lanes // 128)))


@triton.jit
def token_and_weight(labels_ptr, weights_ptr, row, WEIGHTED: tl.constexpr):
    """(label, weight) of a row; weight 0 says that the token takes no part."""
    label = tl.load(labels_ptr + row).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights_ptr + row).to(tl.float32)
    return label, tl.where(label < 0, 0.0, weight)


@triton.jit
def row_statistics(
    row_ptr, num_columns, vocab_size, LOGIT_SUM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """(max, sum of exp(x - max), sum of x) over a row's first `vocab_size` columns; (-inf, 0, 0) of none.

    CACHE is the eviction policy of what is read, "" for the hardware's own; every caller names it, as Triton
    3.6 compiles no default of a string.
    """
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    peak = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    logit_sum = tl.zeros([LANES], tl.float32)
    for start in range(0, num_columns, LANES * WIDTH):
        column = start + tile
        x = tl.load(row_ptr + column, mask=column < num_columns, other=0.0, eviction_policy=CACHE)
        x = x.to(tl.float32)
        if LOGIT_SUM:
            logit_sum += tl.sum(tl.where(column < vocab_size, x, 0.0), axis=1)
        x = tl.where(column < vocab_size, x, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(x, axis=1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf - -inf would be NaN
        weight = tl.exp2((x - shift[:, None]) * LOG2_E)
        total = total * tl.exp2((peak - shift) * LOG2_E) + tl.sum(weight, axis=1)
        peak = new_peak
    row_peak = tl.max(peak, axis=0)
    shift = tl.where(row_peak == -float("inf"), 0.0, row_peak)
    return row_peak, tl.sum(total * tl.exp2((peak - shift) * LOG2_E), axis=0), tl.sum(logit_sum, axis=0)


@triton.jit
def label_logit(row_ptr, label, vocab_start, num_local, vocab_size):
    """The label's logit: 0 where another shard holds it, NaN where the vocabulary does not."""
    local = label - vocab_start
    here = (local >= 0) & (local < num_local)
    x = tl.load(row_ptr + local, mask=here, other=0.0).to(tl.float32)
    return tl.where(label < vocab_size, x, float("nan"))


@triton.jit
def logit_gradient(x, column, lse, scale, local_label, num_local, label_share, other_share, z_loss):
    """scale * d loss / d x, 0 in the padding."""
    grad = tl.exp2((x - lse) * LOG2_E) * (1.0 + 2.0 * z_loss * lse) - other_share
    grad = tl.where(column == local_label, grad - label_share, grad)
    return tl.where(column < num_local, grad * scale, 0.0)
