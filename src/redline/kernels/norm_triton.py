"""RMSNorm and LayerNorm in Triton: one pair of kernels, with a mean to subtract or none.

Forward: a program takes whole rows, as many as fill a tile, so that several 16-byte loads a thread are in
flight and the vectors are read once a tile; mean and variance are two passes over registers. (Wide rows
without a residual: wide_norm_triton.py.) Backward: a persistent grid walks the rows and keeps the gradients
of weight and bias in fp32 registers; the next rows are on their way to shared memory while this one's sums
are made, so that memory never waits for the exchange between warps. Each program writes one partial row of
each gradient, and a second launch adds those in fixed order, straight into main_grad where one is given.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import (
    RowConfig,
    TileConfig,
    as_rows,
    ceil_div,
    contiguous_like,
    next_power_of_2,
    num_sms,
    on_device_of,
)
from redline.kernels.launch import launchable, shared_memory
from redline.kernels.triton_common import Sum, column_sums, whole_rows
from redline.kernels.wide_norm_triton import WIDE, wide_norm_forward

STAGED_COLS = 8192  # wider rows leave no registers
MAX_REGISTERS = 128  # of a thread, so that the 16 warps that an SM is planned to hold do fit


@functools.cache
def forward_config(cols: int, layer: bool) -> TileConfig:
    """A tile of 4096 elements over 8 warps, two 16-byte loads of bf16 a thread; of LayerNorm twice as many.

    A row of 4096 so takes 69 us for 128 MiB on an H200, two of them at a time 70, over 4 warps 71. With a
    mean to wait for two rows take 69.4, one 71 to 76. Both sums in one exchange between warps do not pay, nor
    does it pay to fetch the next rows ahead.
    """
    block_cols = next_power_of_2(cols)
    warps = 16 if block_cols > 8192 else 8 if block_cols > 512 else 4
    tile = 8192 if layer and warps >= 8 else 4096
    return TileConfig(max(1, tile // block_cols), block_cols, warps)


@functools.cache
def backward_config(cols: int) -> RowConfig:
    """One row, 16 elements a thread, and 16 warps an SM.

    Two operands of 16 bf16 elements a thread, two steps ahead, are 64 KiB on their way to an SM. Few warps a
    row keep its sums in few barriers, and other programs run meanwhile. A row and the gradients fill 128
    registers, which is what each of 16 warps may have. Rows below 512 share a warp. On an H200 LayerNorm of
    4096 takes 110 us; one step ahead, in registers, 124, and three in shared memory 116. With more warps an
    SM RMSNorm takes 4 to 14 us longer, with 32 elements a thread 57.
    """
    block_cols = next_power_of_2(cols)
    warps = min(16, max(1, block_cols // 512))
    return RowConfig(max(1, 512 // block_cols), block_cols, warps, 16 // warps)


def backward_stages(config: RowConfig, element_bytes: int, shared_bytes: int) -> int:
    """3 where two steps fit in what an SM has of shared memory, for all its programs, else 1: none is ahead.

    Args:
        element_bytes: of an element of all that is read: x, dy and perhaps a gradient of the sum.
    """
    step = config.block_rows * config.block_cols * element_bytes
    ahead = step * 9 // 4  # two of them; rows that are not aligned pass through an eighth more each
    fits = ahead * config.programs_per_sm <= shared_bytes
    return 3 if fits and config.block_cols <= STAGED_COLS else 1


@launchable
@triton.jit
def _norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    rows, cols, x_stride, residual_stride, eps,
    ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Without mean_ptr the mean is not subtracted: RMSNorm."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    mask = (row < rows)[:, None] & (col < cols)
    x = tl.load(x_ptr + (row * x_stride)[:, None] + col, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + (row * residual_stride)[:, None] + col, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + (row * cols)[:, None] + col, total, mask=mask)
        x = total.to(tl.float32)  # what backward will read
    weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0)
    if bias_ptr is not None:  # fetched before the sums, which the row has to wait for
        bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=1) / cols
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(mask, x - mean[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(x * x, axis=1) / cols + eps)
    rstd = 1.0 / deviation
    # A division lets what is written wait a moment longer behind what is read: 1% of RMSNorm on an H200.
    DIVIDED: tl.constexpr = mean_ptr is None and BLOCK_COLS <= 8192
    x = x / deviation[:, None] if DIVIDED else x * rstd[:, None]
    y = x * (weight.to(tl.float32) + 1.0 if ZERO_CENTERED else weight.to(tl.float32))
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    tl.store(y_ptr + (row * cols)[:, None] + col, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _statistic(ptr, row, rows):
    return tl.load(ptr + row, mask=row < rows, other=0.0)[:, None]


@launchable
@triton.jit
def _norm_bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, cols, dy_stride, dsum_stride, x_stride,
    ZERO_CENTERED: tl.constexpr, STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dweight_ptr and dbias_ptr (or None) are the partial sums [programs, cols]; see forward for mean_ptr."""
    program = tl.program_id(0)
    step = tl.num_programs(0) * BLOCK_ROWS
    col = tl.arange(0, BLOCK_COLS)[None, :]
    if STAGES > 1:
        weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for first in tl.range(program * BLOCK_ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        x = whole_rows(x_ptr, row, x_stride, col, rows, cols)
        dy = whole_rows(dy_ptr, row, dy_stride, col, rows, cols)
        rstd = _statistic(rstd_ptr, row, rows)
        if STAGES == 1:  # wide rows fill the registers: the weight comes from the cache each time
            weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0)
        mask = (row < rows)[:, None] & (col < cols)
        x_hat, dx = x.to(tl.float32), dy.to(tl.float32)
        if mean_ptr is not None:
            x_hat = tl.where(mask, x_hat - _statistic(mean_ptr, row, rows), 0.0)
        x_hat *= rstd
        dweight += dx * x_hat
        if dbias_ptr is not None:
            dbias += dx
        dx *= weight.to(tl.float32) + 1.0 if ZERO_CENTERED else weight.to(tl.float32)
        along = tl.sum(x_hat * dx, axis=1)[:, None] / cols
        if mean_ptr is not None:
            dx -= tl.sum(dx, axis=1)[:, None] / cols
        dx = rstd * (dx - x_hat * along)
        if dsum_ptr is not None:
            dx += whole_rows(dsum_ptr, row, dsum_stride, col, rows, cols).to(tl.float32)
        tl.store(dx_ptr + (row * cols)[:, None] + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, BLOCK_COLS)
    target = program.to(tl.int64) * cols + column
    tl.store(dweight_ptr + target, tl.sum(dweight, axis=0), mask=column < cols)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + target, tl.sum(dbias, axis=0), mask=column < cols)


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None,
    eps: float, zero_centered: bool, out_dtype: torch.dtype, layer: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """(y, sum, mean, rstd) of x [..., H]: no sum without a residual, a mean only of LayerNorm.

    Statistics are fp32, one a row.
    """
    y = contiguous_like(x, out_dtype)
    total = None if residual is None else contiguous_like(residual)
    cols = x.shape[-1]
    rows = x.numel() // cols
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    if rows == 0:
        return y, total, mean, rstd
    x_rows, residual_rows = as_rows(x), None if residual is None else as_rows(residual)
    if cols > WIDE and residual is None:
        with on_device_of(x):
            wide_norm_forward(x_rows, weight, bias, y, mean, rstd, eps, zero_centered)
        return y, total, mean, rstd
    config = forward_config(cols, layer)
    with on_device_of(x):
        _norm_fwd_kernel[(ceil_div(rows, config.block_rows),)](
            x_rows, residual_rows, weight, bias, y, total, mean, rstd, rows, cols, x_rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0), eps, zero_centered,
            config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return y, total, mean, rstd


def norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
    dweight: Tensor, dbias: Tensor | None, accumulate: tuple[bool, bool], zero_centered: bool,
) -> Tensor:  # fmt: skip
    """dx in x's dtype. Writes the gradients of weight and bias to (`accumulate`: adds them to) what is given.

    dx is the gradient of the sum (so of x and of the residual) where `dsum` is given.
    """
    dx = contiguous_like(x)
    cols = x.shape[-1]
    rows = x.numel() // cols
    if rows == 0:
        for grad, kept in zip((dweight, dbias), accumulate, strict=True):
            if grad is not None and not kept:
                grad.zero_()
        return dx
    x_rows, dy_rows, dsum_rows = as_rows(x), as_rows(dy), None if dsum is None else as_rows(dsum)
    config = backward_config(cols)
    programs = min(num_sms(x.get_device()) * config.programs_per_sm, ceil_div(rows, config.block_rows))
    partial, bias_partial = x.new_empty((2, programs, cols), dtype=torch.float32).unbind()
    element_bytes = x.itemsize + dy.itemsize + (0 if dsum is None else dsum.itemsize)
    stages = backward_stages(config, element_bytes, shared_memory(x.get_device()))
    with on_device_of(x):
        _norm_bwd_kernel[(programs,)](
            dy_rows, dsum_rows, x_rows, weight, mean, rstd, dx, partial,
            None if dbias is None else bias_partial, rows, cols, dy_rows.stride(0),
            0 if dsum_rows is None else dsum_rows.stride(0), x_rows.stride(0), zero_centered,
            stages, config.block_rows, config.block_cols,
            num_warps=config.num_warps, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        bias_sum = None if dbias is None else Sum(bias_partial, dbias, accumulate[1])
        column_sums(Sum(partial, dweight, accumulate[0]), bias_sum)
    return dx
