"""Gated activations in Triton, for SwiGLU and GEGLU: one pass each way, nothing kept but the input.

A program takes a tile of gate and the same tile of up. How many tiles lie side by side is a constant: loads
would wait for a division by it. Backward with a bias lets each program walk down its strip of columns, so
that the bias gradient is summed in fp32 registers; a second launch adds the programs' partial rows in fixed
order.
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
from redline.kernels.triton_common import (
    Sum,
    activate,
    activate_and_slope,
    at_most,
    beyond,
    column_sums,
    within,
)


@triton.jit
def _load_gate_up(x_ptr, bias_ptr, row, col, mask, cols, x_stride):
    """[gate | up] + bias in fp32 at rows `row`, columns `col` of F = cols."""
    offset = (row * x_stride)[:, None] + col[None, :]
    gate = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + cols + offset, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + cols + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    return gate, up


@launchable
@triton.jit
def _gated_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, rows, cols, x_stride, limit, shift,
    KIND: tl.constexpr, FAST: tl.constexpr, CLAMP: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    SHORT: tl.constexpr = y_ptr.dtype.element_ty != tl.float32
    program = tl.program_id(0)
    row = (program // STRIPS).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (program % STRIPS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    gate, up = _load_gate_up(x_ptr, bias_ptr, row, col, mask, cols, x_stride)
    if CLAMP:
        gate, up = at_most(gate, limit), within(up, limit)
    y = activate(gate, KIND, SHORT, FAST) * (up + shift)
    tl.store(y_ptr + (row * cols)[:, None] + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@launchable
@triton.jit
def _gated_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, rows, cols, dy_stride, x_stride, limit, shift, splits,
    KIND: tl.constexpr, FAST: tl.constexpr, CLAMP: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    SHORT: tl.constexpr = dx_ptr.dtype.element_ty != tl.float32
    split = tl.program_id(0) // STRIPS
    col = (tl.program_id(0) % STRIPS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    dgate_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dup_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in tl.range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        gate, up = _load_gate_up(x_ptr, bias_ptr, row, col, mask, cols, x_stride)
        dy = tl.load(dy_ptr + (row * dy_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        gate_grad, up_grad = dy, dy
        if CLAMP:
            gate_grad = tl.where(gate > limit, 0.0, dy)
            up_grad = tl.where(beyond(up, limit), 0.0, dy)
            gate, up = at_most(gate, limit), within(up, limit)
        value, slope = activate_and_slope(gate, KIND, SHORT, FAST)
        dgate = gate_grad * (up + shift) * slope
        dup = up_grad * value
        target = dx_ptr + (row * (2 * cols))[:, None] + col[None, :]
        tl.store(target, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(target + cols, dup.to(dx_ptr.dtype.element_ty), mask=mask)
        if bias_ptr is not None:
            dgate_sum += dgate
            dup_sum += dup
    if bias_ptr is not None:
        target = partial_ptr + split.to(tl.int64) * (2 * cols) + col
        tl.store(target, tl.sum(dgate_sum, axis=0), mask=col < cols)
        tl.store(target + cols, tl.sum(dup_sum, axis=0), mask=col < cols)


def gated_forward(x: Tensor, bias: Tensor | None, kind: str, clamp: float | None, offset: float) -> Tensor:
    """act(gate) * (up + offset): x [..., 2F], bias [2F] or None -> y [..., F]; `kind` as in `activate`."""
    *outer, width = x.shape
    cols = width // 2
    y = x.new_empty(*outer, cols)
    if y.numel() == 0:
        return y
    x_rows = as_rows(x)
    rows, config = x_rows.shape[0], tile_config(cols)
    strips = ceil_div(cols, config.block_cols)
    with on_device_of(x):
        _gated_fwd_kernel[(strips * ceil_div(rows, config.block_rows),)](
            x_rows, bias, y, rows, cols, x_rows.stride(0), clamp or 0.0, offset,
            kind, on_nvidia(x), clamp is not None, strips, config.block_rows, config.block_cols,
            num_warps=config.num_warps,
        )  # fmt: skip
    return y


def gated_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    kind: str,
    clamp: float | None,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """(dx [..., 2F], dbias [2F]); dbias is empty without a bias, and where it was added to main_grad."""
    dx = contiguous_like(x)
    wanted = bias is not None and main_grad is None
    dbias = (x if bias is None else bias).new_empty(x.shape[-1] if wanted else 0)
    if x.numel() == 0:
        return dx, dbias.zero_()
    x_rows, dy_rows = as_rows(x), as_rows(dy)
    rows, cols, config = x_rows.shape[0], dy_rows.shape[1], tile_config(dy_rows.shape[1])
    strips, splits = ceil_div(cols, config.block_cols), ceil_div(rows, config.block_rows)
    if bias is not None:  # no more programs than are resident at once, each a long strip
        splits = min(splits, max(1, 4 * num_sms(x.get_device()) // strips))
    partial = None if bias is None else x.new_empty((splits, 2 * cols), dtype=torch.float32)
    with on_device_of(x):
        _gated_bwd_kernel[(strips * splits,)](
            dy_rows, x_rows, bias, dx, partial, rows, cols, dy_rows.stride(0), x_rows.stride(0),
            clamp or 0.0, offset, splits, kind, on_nvidia(x), clamp is not None,
            strips, config.block_rows, config.block_cols,
            3 if partial is not None else 1,  # a strip prefetches
            num_warps=config.num_warps,
        )  # fmt: skip
        if partial is not None:
            column_sums(Sum.of(partial, dbias, main_grad))
    return dx, dbias
