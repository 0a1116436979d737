"""Activations without a gate in Triton, for GELU and squared ReLU: one pass each way, only the input kept.

How many tiles lie side by side is a constant: loads would wait for a division by it. Backward with a bias
lets each program walk down its strip of columns, so that the bias gradient is summed in fp32 registers; a
second launch adds the programs' partial rows in fixed order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import (
    as_rows,
    ceil_div,
    contiguous_like,
    num_sms,
    on_device_of,
    on_nvidia,
    tile_config,
)
from redline.kernels.launch import launchable
from redline.kernels.triton_common import Sum, activate, activate_and_slope, column_sums


@launchable
@triton.jit
def _ungated_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, rows, cols, x_stride,
    KIND: tl.constexpr, FAST: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    SHORT: tl.constexpr = y_ptr.dtype.element_ty != tl.float32
    program = tl.program_id(0)
    row = (program // STRIPS).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (program % STRIPS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    y = activate(x, KIND, SHORT, FAST).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (row * cols)[:, None] + col[None, :], y, mask=mask)


@launchable
@triton.jit
def _ungated_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, rows, cols, dy_stride, x_stride, splits,
    KIND: tl.constexpr, FAST: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    SHORT: tl.constexpr = dx_ptr.dtype.element_ty != tl.float32
    split = tl.program_id(0) // STRIPS
    col = (tl.program_id(0) % STRIPS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in tl.range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + (row * dy_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
        dx = dy.to(tl.float32) * activate_and_slope(x, KIND, SHORT, FAST)[1]
        target = dx_ptr + (row * cols)[:, None] + col[None, :]
        tl.store(target, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if bias_ptr is not None:
            dbias += dx
    if bias_ptr is not None:
        tl.store(partial_ptr + split.to(tl.int64) * cols + col, tl.sum(dbias, axis=0), mask=col < cols)


def ungated_forward(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """x [..., F], bias [F] or None -> y [..., F]; `kind` as in `activate`."""
    y = contiguous_like(x)
    if y.numel() == 0:
        return y
    x_rows = as_rows(x)
    # A bias is read once for two rows, where the arithmetic leaves no time to read it twice.
    (rows, cols), paired = x_rows.shape, bias is not None and kind != "relu2"
    config = tile_config(cols, 2048 if paired else 1024)
    strips = ceil_div(cols, config.block_cols)
    with on_device_of(x):
        _ungated_fwd_kernel[(strips * ceil_div(rows, config.block_rows),)](
            x_rows, bias, y, rows, cols, x_rows.stride(0), kind, on_nvidia(x),
            strips, config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return y


def ungated_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """(dx [..., F], dbias [F]); dbias is empty without a bias, and where it was added to main_grad."""
    dx = contiguous_like(x)
    wanted = bias is not None and main_grad is None
    dbias = (x if bias is None else bias).new_empty(x.shape[-1] if wanted else 0)
    if x.numel() == 0:
        return dx, dbias.zero_()
    x_rows, dy_rows = as_rows(x), as_rows(dy)
    (rows, cols), config = x_rows.shape, tile_config(x_rows.shape[1], 1024 if bias is None else 2048)
    strips, splits = ceil_div(cols, config.block_cols), ceil_div(rows, config.block_rows)
    partial = None
    if bias is not None:  # no more programs than are resident at once, each a long strip
        splits = min(splits, max(1, 6 * num_sms(x.get_device()) // strips))
        partial = x.new_empty((splits, cols), dtype=torch.float32)
    with on_device_of(x):
        _ungated_bwd_kernel[(strips * splits,)](
            dy_rows, x_rows, bias, dx, partial, rows, cols, dy_rows.stride(0), x_rows.stride(0), splits,
            kind, on_nvidia(x), strips, config.block_rows, config.block_cols,
            3 if partial is not None else 1,  # a strip prefetches
            num_warps=config.num_warps,
        )  # fmt: skip
        if partial is not None:
            column_sums(Sum.of(partial, dbias, main_grad))
    return dx, dbias
