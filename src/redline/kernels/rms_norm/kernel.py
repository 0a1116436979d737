"""RMSNorm in Triton.

Forward: a program takes whole rows, as many as fill a tile, so that several 16-byte loads a thread are in
flight and the weight is read once a tile. Backward: a persistent grid walks the rows and keeps the weight's
gradient in fp32 registers; each program writes one partial row, and a second launch adds those in fixed
order, straight into main_grad where one is given.
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
from redline.kernels.triton_common import column_sum


@functools.cache
def forward_config(cols: int) -> TileConfig:
    """A tile of 8192 elements over 8 warps: four 16-byte loads of bf16 a thread, 3 programs an SM."""
    block_cols = next_power_of_2(cols)
    warps = 16 if block_cols > 8192 else 8 if block_cols > 512 else 4
    tile = 8192 if warps >= 8 else 4096
    return TileConfig(max(1, tile // block_cols), block_cols, warps)


@functools.cache
def backward_config(cols: int) -> RowConfig:
    """16 elements a thread: x, dy, the weight and its gradient take 120 registers: 16 warps fit an SM.

    Loads run two steps ahead through shared memory. Rows above 8192 take 32 elements a thread, read the
    weight again each step and stay one step ahead.
    """
    block_cols = next_power_of_2(cols)
    if block_cols > 8192:
        return RowConfig(1, block_cols, 16, 1, 2)
    warps = 4 if block_cols <= 1024 else 8 if block_cols <= 4096 else 16
    return RowConfig(max(1, warps * 512 // block_cols), block_cols, warps, 16 // warps, 3)


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, rows, cols, x_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    mask = (row < rows)[:, None] & (col < cols)
    x = tl.load(x_ptr + (row * x_stride)[:, None] + col, mask=mask, other=0.0).to(tl.float32)
    offset = (row * cols)[:, None] + col
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + (row * residual_stride)[:, None] + col, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offset, total, mask=mask)
        x = total.to(tl.float32)  # what backward will read
    weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / cols + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    tl.store(y_ptr + offset, (x * rstd[:, None] * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr,
    rows, cols, dy_stride, dsum_stride, x_stride,
    HAS_DSUM: tl.constexpr, ZERO_CENTERED: tl.constexpr, KEEP_WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    if KEEP_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(program * BLOCK_ROWS, rows, step, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (col < cols)
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + (row * dy_stride)[:, None] + col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        if not KEEP_WEIGHT:
            weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        gain = weight + 1.0 if ZERO_CENTERED else weight
        x_hat = x * rstd
        dx_hat = dy * gain
        dweight += dy * x_hat
        mean = tl.sum(x_hat * dx_hat, axis=1)[:, None] / cols
        dx = rstd * (dx_hat - x_hat * mean)
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + (row * dsum_stride)[:, None] + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + (row * cols)[:, None] + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, BLOCK_COLS)
    tl.store(partial_ptr + program.to(tl.int64) * cols + column, tl.sum(dweight, axis=0), mask=column < cols)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, rstd) of x [..., H]; sum is empty where there is no residual. rstd is fp32, one a row."""
    y = contiguous_like(x, out_dtype)
    total = x.new_empty(0) if residual is None else contiguous_like(residual)
    cols = x.shape[-1]
    rows = x.numel() // cols
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows == 0:
        return y, total, rstd
    x_rows, residual_rows = as_rows(x), None if residual is None else as_rows(residual)
    config = forward_config(cols)
    with on_device_of(x):
        _rms_norm_fwd_kernel[(ceil_div(rows, config.block_rows),)](
            x_rows, residual_rows, weight, y, total, rstd, rows, cols, x_rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0), eps,
            residual is not None, zero_centered, config.block_rows, config.block_cols,
            num_warps=config.num_warps,
        )  # fmt: skip
    return y, total, rstd


def backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    main_grad: Tensor | None,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """(dx, dweight). With a main_grad the weight's gradient is added there and dweight is empty.

    dx has x's dtype, and is the gradient of the sum (so of x and of the residual) where `dsum` is given.
    """
    dx = contiguous_like(x)
    cols = x.shape[-1]
    rows = x.numel() // cols
    dweight = weight.new_empty(0 if main_grad is not None else cols)
    if rows == 0:
        return dx, dweight.zero_()
    x_rows, dy_rows, dsum_rows = as_rows(x), as_rows(dy), None if dsum is None else as_rows(dsum)
    config = backward_config(cols)
    programs = min(num_sms(x.get_device()) * config.programs_per_sm, ceil_div(rows, config.block_rows))
    partial = torch.empty((programs, cols), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _rms_norm_bwd_kernel[(programs,)](
            dy_rows, dsum_rows, x_rows, weight, rstd, dx, partial, rows, cols, dy_rows.stride(0),
            0 if dsum_rows is None else dsum_rows.stride(0), x_rows.stride(0),
            dsum is not None, zero_centered, config.block_cols <= 8192,
            config.block_rows, config.block_cols, config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
        column_sum(partial, dweight if main_grad is None else main_grad, main_grad is not None)
    return dx, dweight
