"""Casts to fp8 in Triton: one read of a tensor gives its fp8 copy, the transposed copy, its largest value.

A GEMM on Hopper takes both operands contiguous along the dimension it sums over. What is made for forward
[T, C] has to be [C, T] for the weight gradient, so a cast may write either layout or both. Grids are
persistent: a program walks over many tiles and sends its largest value once; the order does not matter.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import as_rows, ceil_div, next_power_of_2, num_sms, on_device_of
from redline.kernels.fp8.reference import FP8_MAX, padded
from redline.kernels.launch import launchable
from redline.kernels.triton_common import (
    Sum,
    activate,
    activate_and_slope,
    at_most,
    beyond,
    column_sums,
    whole_rows,
    within,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns that a program takes at a time, its warps, and programs an SM (0: one a tile).

    Tiles are taken by rows of `group` of them: what these write transposed then lies side by side.
    """

    rows: int
    cols: int
    warps: int
    per_sm: int = 0
    group: int = 1

    def within(self, cols: int) -> Tile:
        """The same number of elements, over no more columns than there are."""
        width = min(self.cols, next_power_of_2(cols))
        return replace(self, rows=self.rows * self.cols // width, cols=width)

    def grid(self, rows: int, cols: int, x: Tensor) -> tuple[int]:
        """Programs for a matrix of this size."""
        tiles = ceil_div(rows, self.rows) * ceil_div(cols, self.cols)
        return (min(tiles, self.per_sm * num_sms(x.get_device())) if self.per_sm else tiles,)


# Chosen on an H200 among the variants of benchmarks/tune_fp8.py.
TILES = {
    "cast": Tile(2, 4096, 8),
    "cast both": Tile(64, 128, 4),
    "transpose": Tile(128, 256, 8, group=8),
    "activation": Tile(8, 1024, 8),
    "activation backward": Tile(1, 2048, 4),
    "norm": Tile(4096, 1, 8, per_sm=4),  # elements of whole rows
}


@triton.jit
def _fp8(x, scale, MAX: tl.constexpr, out_ptr):
    """x * scale in the dtype of out_ptr, saturated; NaN stays. MAX is 0 where the instruction saturates."""
    y = x * scale
    if MAX > 0:
        y = tl.where(y > MAX, MAX, tl.where(y < -MAX, -MAX, y))
    return y.to(out_ptr.dtype.element_ty)


def limit_of(dtype: torch.dtype, x: Tensor) -> float:
    """What kernels cut values off at; 0 on NVIDIA cards, whose instruction (cvt.satfinite) does it."""
    return 0.0 if x.is_cuda and torch.version.hip is None else FP8_MAX[dtype]


@triton.jit
def _place(tile, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr):
    """(rows [BLOCK_ROWS], columns [BLOCK_COLS]) of a tile, in 64 bits."""
    strips, blocks = tl.cdiv(cols, BLOCK_COLS), tl.cdiv(rows, BLOCK_ROWS)
    first = tile // (strips * GROUP) * GROUP
    height = tl.minimum(blocks - first, GROUP)
    within = tile % (strips * GROUP)
    row = (first + within % height).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, (within // height).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)


@launchable
@triton.jit
def _cast_kernel(
    x_ptr, scale_ptr, amax_ptr, q_ptr, qt_ptr, rows, cols, x_stride, t_stride,
    MAX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * tl.cdiv(cols, BLOCK_COLS)
    largest = 0.0
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = _place(tile, rows, cols, BLOCK_ROWS, BLOCK_COLS, GROUP)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x)))
        if ROWS:
            q = _fp8(x, scale, MAX, q_ptr)
            tl.store(q_ptr + (row * cols)[:, None] + col[None, :], q, mask=mask)
        if COLUMNS:
            qt = tl.trans(_fp8(x, scale, MAX, qt_ptr))
            target = qt_ptr + (col * t_stride)[:, None] + row[None, :]
            tl.store(target, qt, mask=(col < cols)[:, None] & (row < t_stride)[None, :])
    tl.atomic_max(amax_ptr, largest)


@launchable
@triton.jit
def _transpose_kernel(
    q_ptr, qt_ptr, rows, cols, t_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, col = _place(tl.program_id(0), rows, cols, BLOCK_ROWS, BLOCK_COLS, GROUP)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    q = tl.load(q_ptr + (row * cols)[:, None] + col[None, :], mask=mask, other=0)
    target = qt_ptr + (col * t_stride)[:, None] + row[None, :]
    tl.store(target, tl.trans(q), mask=(col < cols)[:, None] & (row < t_stride)[None, :])


@launchable
@triton.jit
def _norm_cast_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, amax_ptr, q_ptr, mean_ptr, rstd_ptr, rows, cols, x_stride, eps,
    LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr, MAX: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """AHEAD: a program takes several tiles, the next of which is fetched before this one's sums are made."""
    scale = tl.load(scale_ptr)
    step = tl.num_programs(0) * BLOCK_ROWS
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    fetched = whole_rows(x_ptr, row, x_stride, col, rows, cols)
    weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    largest = 0.0
    for _ in range(tl.program_id(0) * BLOCK_ROWS, rows, step):
        x = fetched.to(tl.float32)
        if AHEAD:
            fetched = whole_rows(x_ptr, row + step, x_stride, col, rows, cols)
        mask = (row < rows)[:, None] & (col < cols)
        if LAYER:
            mean = tl.sum(x, axis=1) / cols
            tl.store(mean_ptr + row, mean, mask=row < rows)
            x = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / cols + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
        y = x * rstd[:, None] * weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
            y = tl.where(mask, y, 0.0)  # a bias alone must not count
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)  # what the GEMM in bf16 would read
        largest = tl.maximum(largest, tl.max(tl.abs(y)))
        tl.store(q_ptr + (row * cols)[:, None] + col, _fp8(y, scale, MAX, q_ptr), mask=mask)
        row += step
    tl.atomic_max(amax_ptr, largest)


@triton.jit
def _biased(x_ptr, bias_ptr, offset, col, mask, cols, shift):
    """x + bias in fp32 at `offset`, whose columns start at `shift`."""
    x = tl.load(x_ptr + offset + shift, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + shift + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _shifted(up, SHIFT: tl.constexpr):
    """What the gate multiplies."""
    if SHIFT != 0.0:
        up += SHIFT
    return up


@launchable
@triton.jit
def _activation_cast_kernel(
    x_ptr, bias_ptr, scale_ptr, amax_ptr, q_ptr, rows, cols, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    MAX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    strips = tl.cdiv(cols, BLOCK_COLS)
    largest = 0.0
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS) * strips, tl.num_programs(0)):
        row = (tile // strips).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = (tile % strips) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        offset = (row * x_stride)[:, None] + col[None, :]
        gate = _biased(x_ptr, bias_ptr, offset, col, mask, cols, 0)
        y = activate(at_most(gate, LIMIT), KIND)
        if GATED:
            up = _biased(x_ptr, bias_ptr, offset, col, mask, cols, cols)
            y *= _shifted(within(up, LIMIT), SHIFT)
        y = tl.where(mask, y.to(x_ptr.dtype.element_ty).to(tl.float32), 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(y)))
        target = q_ptr + (row * cols)[:, None] + col[None, :]
        tl.store(target, _fp8(y, scale, MAX, q_ptr), mask=mask)
    tl.atomic_max(amax_ptr, largest)


@launchable
@triton.jit
def _activation_cast_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, scale_ptr, amax_ptr, q_ptr, partial_ptr, rows, cols, dy_stride, x_stride, splits,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    MAX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    width = cols * 2 if GATED else cols
    strips = tl.cdiv(cols, BLOCK_COLS)
    split = tl.program_id(0) // strips
    col = (tl.program_id(0) % strips) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    largest = 0.0
    sum_0 = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    sum_1 = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in tl.range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        offset = (row * x_stride)[:, None] + col[None, :]
        dy = tl.load(dy_ptr + (row * dy_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = _biased(x_ptr, bias_ptr, offset, col, mask, cols, 0)
        value, slope = activate_and_slope(at_most(gate, LIMIT), KIND)
        if GATED:
            dup = dy * value
            if LIMIT is not None:  # beyond it a gradient is 0, so up is read before its own is written
                up = _biased(x_ptr, bias_ptr, offset, col, mask, cols, cols)
                dup = tl.where(beyond(up, LIMIT), 0.0, dup)
                dy = tl.where(gate > LIMIT, 0.0, dy)
            dup = dup.to(x_ptr.dtype.element_ty).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(dup)))
            target = q_ptr + (row * width)[:, None] + cols + col[None, :]
            tl.store(target, _fp8(dup, scale, MAX, q_ptr), mask=mask)
            if LIMIT is None:
                up = _biased(x_ptr, bias_ptr, offset, col, mask, cols, cols)
            dy *= _shifted(within(up, LIMIT), SHIFT)
            if bias_ptr is not None:
                sum_1 += dup
        d = tl.where(mask, (dy * slope).to(x_ptr.dtype.element_ty).to(tl.float32), 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(d)))
        target = q_ptr + (row * width)[:, None] + col[None, :]
        tl.store(target, _fp8(d, scale, MAX, q_ptr), mask=mask)
        if bias_ptr is not None:
            sum_0 += d
    tl.atomic_max(amax_ptr, largest)
    if bias_ptr is not None:
        target = partial_ptr + split.to(tl.int64) * width + col
        tl.store(target, tl.sum(sum_0, axis=0), mask=col < cols)
        if GATED:
            tl.store(target + cols, tl.sum(sum_1, axis=0), mask=col < cols)


def cast(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, rows_wanted: bool, columns_wanted: bool
) -> tuple[Tensor, Tensor]:
    """(q [T, C], q^T [C, T']) of x [T, C]; what is not wanted is empty. `amax` [1] is raised in place."""
    x = as_rows(x)
    rows, cols = x.shape
    q = torch.empty((rows, cols) if rows_wanted else (0,), dtype=dtype, device=x.device)
    qt = torch.empty((cols, padded(rows)) if columns_wanted else (0,), dtype=dtype, device=x.device)
    if x.numel() == 0:
        return q, qt
    tile = TILES["cast both"] if columns_wanted else TILES["cast"].within(cols)
    with on_device_of(x):
        _cast_kernel[tile.grid(rows, cols, x)](
            x, scale, amax, q, qt, rows, cols, x.stride(0), qt.shape[-1], limit_of(dtype, x), rows_wanted,
            columns_wanted, tile.rows, tile.cols, tile.group, num_warps=tile.warps,
        )  # fmt: skip
    return q, qt


def transpose(q: Tensor) -> Tensor:
    """[T, C] -> [C, T'], padded with zeros."""
    rows, cols = q.shape
    qt = torch.empty((cols, padded(rows)), dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return qt
    tile = TILES["transpose"]
    with on_device_of(q):  # bytes are moved, not numbers
        _transpose_kernel[tile.grid(rows, cols, q)](
            q.view(torch.uint8), qt.view(torch.uint8), rows, cols, qt.shape[1], tile.rows, tile.cols,
            tile.group, num_warps=tile.warps,
        )  # fmt: skip
    return qt


def norm_cast(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H], mean, rstd) of the RMSNorm or, with `layer`, LayerNorm of x; mean is empty for RMSNorm."""
    x = as_rows(x)
    rows, cols = x.shape
    q = torch.empty((rows, cols), dtype=dtype, device=x.device)
    mean = torch.empty(rows if layer else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return q, mean, rstd
    block_cols = next_power_of_2(cols)
    tile = TILES["norm"]
    block_rows, num_warps = max(1, tile.rows // block_cols), 16 if block_cols > 8192 else tile.warps
    with on_device_of(x):
        _norm_cast_kernel[Tile(block_rows, cols, num_warps, tile.per_sm).grid(rows, cols, x)](
            x, weight, bias, scale, amax, q, mean, rstd, rows, cols, x.stride(0), eps, layer,
            zero_centered, limit_of(dtype, x), tile.per_sm > 0, block_rows, block_cols,
            num_warps=num_warps,
        )  # fmt: skip
    return q, mean, rstd


def activation_cast(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    gated: bool,
    clamp: float | None,
    offset: float,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """q [T, F] of act(x + bias), x [T, F], or of act(gate) * (up + offset), x [T, 2F] = [gate | up].

    `clamp` limits gate from above and up on both sides. It and `offset` are constants of the compiled form.
    """
    x = as_rows(x)
    rows, cols = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    q = torch.empty((rows, cols), dtype=dtype, device=x.device)
    if q.numel() == 0:
        return q
    tile = TILES["activation"].within(cols)
    with on_device_of(x):
        _activation_cast_kernel[tile.grid(rows, cols, x)](
            x, bias, scale, amax, q, rows, cols, x.stride(0), kind, gated, clamp, offset,
            limit_of(dtype, x), tile.rows, tile.cols, num_warps=tile.warps,
        )  # fmt: skip
    return q


def activation_cast_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    kind: str,
    gated: bool,
    clamp: float | None,
    offset: float,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx in fp8 [T, X], transposed [X, T'], dbias [X]); dbias is empty without one or with main_grad."""
    x, dy = as_rows(x), as_rows(dy)
    (rows, width), cols = x.shape, dy.shape[1]
    q = torch.empty((rows, width), dtype=dtype, device=x.device)
    wanted = bias is not None and main_grad is None
    dbias = (x if bias is None else bias).new_empty(width if wanted else 0)
    if x.numel() == 0:
        return q, transpose(q), dbias.zero_()
    tile = TILES["activation backward"].within(cols)
    strips, splits = ceil_div(cols, tile.cols), ceil_div(rows, tile.rows)
    if tile.per_sm or bias is not None:  # long strips: fewer partial sums of the bias
        splits = min(splits, max(1, ceil_div((tile.per_sm or 4) * num_sms(x.get_device()), strips)))
    partial = None if bias is None else x.new_empty((splits, width), dtype=torch.float32)
    with on_device_of(x):
        _activation_cast_bwd_kernel[(strips * splits,)](
            dy, x, bias, scale, amax, q, partial, rows, cols, dy.stride(0), x.stride(0), splits, kind, gated,
            clamp, offset, limit_of(dtype, x), tile.rows, tile.cols, num_warps=tile.warps,
        )  # fmt: skip
        if partial is not None:
            column_sums(Sum.of(partial, dbias, main_grad))
    return q, transpose(q), dbias
