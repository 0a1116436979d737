"""Casts to fp8 in Triton: one read of a tensor gives its fp8 copy, the transposed copy, its largest value.

A GEMM on Hopper takes both operands contiguous along the dimension it sums over. What is made for forward
[T, C] has to be [C, T] for the weight gradient, so a cast may write either layout (here) or both (turned.py).
A program sends its largest value once, as an atomic maximum that waits for none of its writes: a fence there
keeps a program on its SM until they have arrived. The order does not matter.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import as_rows, ceil_div, next_power_of_2, on_device_of
from redline.kernels.fp8.device import fp8, limit_of, place, rounded, shifted
from redline.kernels.fp8.reference import padded
from redline.kernels.fp8.tiles import TILES, Tile, backward_tile
from redline.kernels.fp8.turned import _backward_kernel, _cast_both_kernel, _transpose_kernel
from redline.kernels.launch import launchable
from redline.kernels.triton_common import Sum, activate, at_most, column_sums, whole_rows, within

WIDE = 16  # columns: rows of both layouts leave as words only where they begin at multiples of so many


@launchable
@triton.jit
def _cast_kernel(
    x_ptr, scale_ptr, amax_ptr, q_ptr, rows, cols, x_stride,
    MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * tl.cdiv(cols, BLOCK_COLS)
    largest = 0.0
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = place(tile, cols, BLOCK_ROWS, BLOCK_COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        at = x_ptr + (row * x_stride)[:, None] + col[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x)))
        if ROWS:
            q = fp8(x, scale, MAX, q_ptr)
            tl.store(q_ptr + (row * cols)[:, None] + col[None, :], q, mask=mask)
    tl.atomic_max(amax_ptr, largest, sem="relaxed")


@launchable
@triton.jit
def _norm_cast_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, amax_ptr, q_ptr, mean_ptr, rstd_ptr, rows, cols, x_stride, eps,
    LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr, MAX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A program takes several tiles, the next of which is fetched before this one's sums are made."""
    scale = tl.load(scale_ptr)
    step = tl.num_programs(0) * BLOCK_ROWS
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    fetched = whole_rows(x_ptr, row, x_stride, col, rows, cols)
    weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    largest = tl.zeros([BLOCK_ROWS * BLOCK_COLS // 8], tl.float32)  # of 8 that one thread holds: no exchange
    for _ in tl.range(tl.program_id(0) * BLOCK_ROWS, rows, step):
        x = fetched.to(tl.float32)
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
        y = rounded(y, MAX, x_ptr)
        eights = tl.reshape(tl.abs(y), (BLOCK_ROWS * BLOCK_COLS // 8, 8))
        largest = tl.maximum(largest, tl.max(eights, axis=1))
        tl.store(q_ptr + (row * cols)[:, None] + col, fp8(y, scale, MAX, q_ptr), mask=mask)
        row += step
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@triton.jit
def _biased(x_ptr, bias_ptr, offset, col, mask, cols, shift):
    """x + bias in fp32 at `offset`, whose columns start at `shift`."""
    x = tl.load(x_ptr + offset + shift, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + shift + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    return x


@launchable
@triton.jit
def _activation_cast_kernel(
    x_ptr, bias_ptr, scale_ptr, amax_ptr, q_ptr, rows, cols, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    MAX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * tl.cdiv(cols, BLOCK_COLS)
    largest = 0.0
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = place(tile, cols, BLOCK_ROWS, BLOCK_COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        offset = (row * x_stride)[:, None] + col[None, :]
        gate = _biased(x_ptr, bias_ptr, offset, col, mask, cols, 0)
        y = activate(at_most(gate, LIMIT), KIND, True, MAX == 0)
        if GATED:
            up = _biased(x_ptr, bias_ptr, offset, col, mask, cols, cols)
            y *= shifted(within(up, LIMIT), SHIFT)
        y = tl.where(mask, rounded(y, MAX, x_ptr), 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(y)))
        target = q_ptr + (row * cols)[:, None] + col[None, :]
        tl.store(target, fp8(y, scale, MAX, q_ptr), mask=mask)
    tl.atomic_max(amax_ptr, largest, sem="relaxed")


def near_rows(x: Tensor) -> Tensor:
    """As as_rows. Offsets inside a tile have 32 bits: a view whose rows lie 2^23 values apart is copied."""
    x = as_rows(x)
    return x if x.stride(0) < 1 << 23 else x.contiguous()


def cast(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, rows_wanted: bool, columns_wanted: bool
) -> tuple[Tensor, Tensor]:
    """(q [T, C], q^T [C, T']) of x [T, C]; what is not wanted is empty. `amax` [1] is raised in place."""
    x = near_rows(x)
    rows, cols = x.shape
    turned_back = rows_wanted and columns_wanted and cols % WIDE != 0
    q = x.new_empty((rows, cols) if rows_wanted and not turned_back else (0,), dtype=dtype)
    qt = x.new_empty((cols, padded(rows)) if columns_wanted else (0,), dtype=dtype)
    if x.numel() == 0:
        return q.view(rows, cols) if turned_back else q, qt
    tile = TILES["cast both"] if columns_wanted else TILES["cast"].within(cols)
    shape = rows, cols, x.stride(0)
    with on_device_of(x):
        if columns_wanted:
            _cast_both_kernel[tile.groups(rows, cols)](
                x, scale, amax, q, qt, *shape, qt.shape[1], limit_of(dtype, x),
                rows_wanted and not turned_back, tile.rows, tile.cols, tile.group, num_warps=tile.warps,
            )  # fmt: skip
        else:
            _cast_kernel[tile.grid(rows, cols, x)](
                x, scale, amax, q, *shape, limit_of(dtype, x), rows_wanted, tile.rows, tile.cols,
                num_warps=tile.warps,
            )  # fmt: skip
    return _turned_back(qt, rows) if turned_back else q, qt


def _turned_back(qt: Tensor, rows: int) -> Tensor:
    """q [T, C] out of q^T [C, T'], whatever C is."""
    return transpose(qt)[:rows, : qt.shape[0]].contiguous()


def transpose(q: Tensor) -> Tensor:
    """[T, C] -> [C, T'], padded with zeros."""
    q = near_rows(q)
    rows, cols = q.shape
    qt = torch.empty((cols, padded(rows)), dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return qt
    tile = TILES["transpose"]
    high = tile.rows * max(tile.group, 1)  # of a group: the grid has no part of one
    whole = not any((rows % high, cols % tile.cols, q.stride(0) % WIDE, q.data_ptr() % WIDE))
    if not whole:
        tile = TILES["ragged transpose"]
    with on_device_of(q):  # bytes are moved, not numbers
        _transpose_kernel[tile.groups(rows, cols)](
            q.view(torch.uint8), qt.view(torch.uint8), rows, cols, q.stride(0), qt.shape[1],
            limit_of(q.dtype, q), whole, tile.rows, tile.cols, tile.group, num_warps=tile.warps,
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
            zero_centered, limit_of(dtype, x),
            block_rows, block_cols, num_warps=num_warps,
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
    x, dy = near_rows(x), near_rows(dy)
    (rows, width), cols = x.shape, dy.shape[1]
    turned_back = cols % WIDE != 0
    q = x.new_empty((0,) if turned_back else (rows, width), dtype=dtype)
    qt = x.new_empty((width, padded(rows)), dtype=dtype)
    wanted = bias is not None and main_grad is None
    dbias = (x if bias is None else bias).new_empty(width if wanted else 0)
    if x.numel() == 0:
        return q.view(rows, width), qt, dbias.zero_()
    tile = backward_tile(gated, bias is not None)
    blocks = ceil_div(rows, tile.rows)
    partial = None if bias is None else x.new_empty((blocks, width), dtype=torch.float32)
    with on_device_of(x):
        _backward_kernel[tile.groups(rows, cols)](
            dy, x, bias, scale, amax, q, qt, partial, rows, cols, dy.stride(0), x.stride(0), qt.shape[1],
            kind, gated, clamp, offset, limit_of(dtype, x), not turned_back, tile.rows, tile.cols, tile.group,
            num_warps=tile.warps,
        )  # fmt: skip
        if partial is not None:
            column_sums(Sum.of(partial, dbias, main_grad))
    return _turned_back(qt, rows) if turned_back else q, qt, dbias
