"""RMSNorm and LayerNorm of rows too wide for the registers, forward, in Triton: each row is read again.

A program takes one row, a chunk at a time, and keeps none of it: RMSNorm reads the row once for the sum of
squares and once for the result, LayerNorm once more for its mean. What is read again lies in the L1 cache of
the program's multiprocessor, and as few registers are held, four or more rows are under way there at once.

On an H200, in bf16, LayerNorm of 8192 columns so takes 70 us for 128 MiB where whole rows in registers take
75, of 16384 columns 73 for 113; RMSNorm of 5120 columns 63 for 70, of 8192 67.8 for 68.3. fp32 was not timed.
With a residual, which would be read again too, whole rows stay: they are up to 6% faster, or up to 8% slower
(RMSNorm of 8192 columns, LayerNorm of 5120 and 12288). LayerNorm's mean and squares in one reading, by the
differences from the first element of each lane, are 1 to 3% faster at 5120, 7168 and 12288 columns, and 5 to
9% slower at 8192 and 16384.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import TileConfig, ceil_div
from redline.kernels.launch import launchable

WIDE = 4096  # columns, beyond which a row is read again


@functools.cache
def wide_config(cols: int, layer: bool) -> TileConfig:
    """Chunks of 4096 columns, or of 2048 where one of those is left; block_rows is 1.

    16 warps, which is one 16-byte load of bf16 a thread and chunk, are up to 7% faster than 8 for long rows,
    and 2 to 13% slower for short ones. LayerNorm of 5120 columns takes 7% less in chunks of 1024, that of
    7168 3% more.
    """
    if layer and cols <= 5 * 1024:
        return TileConfig(1, 1024, 4)
    if -cols % WIDE >= WIDE // 2:
        return TileConfig(1, WIDE // 2, 8)
    long = cols > 2 * WIDE if layer else cols >= 2 * WIDE
    return TileConfig(1, WIDE, 16 if long else 8)


@triton.jit
def _chunk(x_ptr, chunk, cols, CHUNK: tl.constexpr, EVICTION: tl.constexpr):
    """A chunk of a row in fp32, 0 beyond it; its columns; and which of them there are."""
    col = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = col < cols
    x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy=EVICTION)
    return x.to(tl.float32), col, mask


@launchable
@triton.jit
def _wide_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, cols, x_stride, eps,
    ZERO_CENTERED: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Without mean_ptr the mean is not subtracted: RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    squares = tl.zeros([CHUNK], tl.float32)
    if mean_ptr is not None:
        total = tl.zeros([CHUNK], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            total += _chunk(x_ptr, chunk, cols, CHUNK, "evict_last")[0]
        mean = tl.sum(total, axis=0) / cols
        tl.store(mean_ptr + row, mean)
    for chunk in tl.static_range(CHUNKS):
        x, _, mask = _chunk(x_ptr, chunk, cols, CHUNK, "evict_last")
        if mean_ptr is not None:
            x = tl.where(mask, x - mean, 0.0)
        squares += x * x
    deviation = tl.sqrt(tl.sum(squares, axis=0) / cols + eps)
    rstd = 1.0 / deviation
    tl.store(rstd_ptr + row, rstd)
    for chunk in tl.static_range(CHUNKS):
        x, col, mask = _chunk(x_ptr, chunk, cols, CHUNK, "evict_first")
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        x = x / deviation if mean_ptr is None else (x - mean) * rstd
        y = x * (weight + 1.0 if ZERO_CENTERED else weight)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=mask)


def wide_norm_forward(
    x_rows: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, mean: Tensor | None, rstd: Tensor,
    eps: float, zero_centered: bool,
) -> None:  # fmt: skip
    """x_rows [rows, H] into y, and fp32 statistics [rows] into rstd and (of LayerNorm) mean."""
    rows, cols = x_rows.shape
    config = wide_config(cols, mean is not None)
    _wide_norm_fwd_kernel[(rows,)](
        x_rows, weight, bias, y, mean, rstd, cols, x_rows.stride(0), eps, zero_centered,
        ceil_div(cols, config.block_cols), config.block_cols, num_warps=config.num_warps,
    )  # fmt: skip
