"""Bias + dropout + residual in Triton: one pass forward, one backward; the mask is recomputed, never stored.

A row is one (s, b); the counter of an element is its place in its whole sample, so the mask is the same
however the sample is cut. Where H is a multiple of 8, one Philox call gives the lanes of 8 neighbours, which
are what a thread reads at once; elsewhere each element draws its own block and picks its lane.

Drawing takes longer than memory does to answer, so what is read must be on its way before it begins. ptxas
moves a load down to where its value is used, past the drawing, which costs it no register. A barrier it does
not move a load across: it stands below the loads of the activations, and above that of the sample's number,
which the drawing waits for.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import as_rows, ceil_div, contiguous_like, num_sms, on_device_of, tile_config
from redline.kernels.launch import launchable
from redline.kernels.triton_common import Sum, column_sums, philox_words, whole_rows
from redline.rng import HIDDEN_LANES

# Of a backward that sums: as many programs of 4 warps and 56 registers as are resident at once. On an H200
# they take 68 us, twice as many 69, 10 of them 90: each multiprocessor has a second turn for one program.
PROGRAMS_PER_SM = 9
# Of one that only sums, as nothing was dropped: the next two steps are on their way to shared memory. That is
# 43 us; with one step ahead in registers it was 45, with none 50.
SUM_PROGRAMS_PER_SM, SUM_STAGES = 12, 3


@triton.jit
def _draw_of(key_ptr, iteration_ptr):
    """What all draws of a launch share: the two key words and the iteration, scalars in memory."""
    k0, k1 = tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32)
    return k0, k1, tl.load(iteration_ptr).to(tl.uint32)


@triton.jit
def _split(index, size):
    """index // size and index % size of what is not negative; signed, both are slower."""
    whole = (tl.cast(index, tl.uint32) // tl.cast(size, tl.uint32)).to(tl.int32)
    return whole, index - whole * size


@triton.jit
def _keep(
    k0, k1, iteration, sample_ptr, positions_ptr, s, b, held, first_col, cols, threshold,
    OCTETS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Which elements of the tile at rows (s, b), columns from `first_col`, survive; `held` rows exist."""
    sample = tl.load(sample_ptr + b)[:, None]
    position = s.to(tl.int64)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + s, mask=held, other=0)
    if OCTETS:
        octet = (first_col >> 3) + tl.arange(0, BLOCK_COLS // 8)
        block = (position * (cols >> 3))[:, None] + octet[None, :]
        w0, w1, w2, w3 = philox_words(k0, k1, iteration, sample, block)
        # A join puts its two sides next to each other in one thread: no word moves between threads.
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK_ROWS, BLOCK_COLS // 2])
        # Compared as the upper half of a word, with the other lane below it, a lane needs no mask.
        lane = tl.reshape(tl.join(word << 16, word), [BLOCK_ROWS, BLOCK_COLS])
        keep = lane >= tl.cast(threshold, tl.uint32) << 16
    else:
        element = (position * cols)[:, None] + (first_col + tl.arange(0, BLOCK_COLS))[None, :]
        w0, w1, w2, w3 = philox_words(k0, k1, iteration, sample, element >> 3)
        index = element.to(tl.uint32) & 7
        word = tl.where(index < 4, tl.where(index < 2, w0, w1), tl.where(index < 6, w2, w3))
        keep = (word >> (index & 1) * 16 & 0xFFFF) >= tl.cast(threshold, tl.uint32)
    return keep


@launchable
@triton.jit
def _bias_dropout_add_fwd_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, key_ptr, iteration_ptr, sample_ptr, positions_ptr,
    rows, cols, x_stride, residual_stride, batch, threshold, scale, DROP: tl.constexpr, OCTETS: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    first_col = tl.program_id(0) % STRIPS * BLOCK_COLS
    row = tl.program_id(0) // STRIPS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = first_col + tl.arange(0, BLOCK_COLS)
    held, wide_row = row < rows, row.to(tl.int64)
    mask = held[:, None] & (col < cols)[None, :]
    x_at = x_ptr + (wide_row * x_stride)[:, None] + col[None, :]
    residual_at = residual_ptr + (wide_row * residual_stride)[:, None] + col[None, :]
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    if DROP:
        tl.debug_barrier()
        k0, k1, iteration = _draw_of(key_ptr, iteration_ptr)
        s, b = _split(row, batch)
        keep = _keep(
            k0, k1, iteration, sample_ptr, positions_ptr, s, b, held, first_col, cols, threshold,
            OCTETS, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        x = tl.where(keep, x, 0.0) * scale
    y = (x + y).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (wide_row * cols)[:, None] + col[None, :], y, mask=mask)


@launchable
@triton.jit
def _bias_dropout_add_bwd_kernel(
    dy_ptr, dx_ptr, partial_ptr, key_ptr, iteration_ptr, sample_ptr, positions_ptr,
    rows, cols, dy_stride, batch, threshold, scale, splits, OCTETS: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Where something was dropped. partial_ptr is None without a bias."""
    split, first_col = tl.program_id(0) // STRIPS, tl.program_id(0) % STRIPS * BLOCK_COLS
    first_row, step = split * BLOCK_ROWS, splits * BLOCK_ROWS
    beside, col = tl.arange(0, BLOCK_ROWS), first_col + tl.arange(0, BLOCK_COLS)
    inside, wide_row, wide_step = (col < cols)[None, :], first_row.to(tl.int64), tl.cast(step, tl.int64)
    k0, k1, iteration = _draw_of(key_ptr, iteration_ptr)
    s, b = _split(first_row + beside, batch)
    step_s, step_b = _split(step, batch)
    dy_at, dx_at = dy_ptr + wide_row * dy_stride, dx_ptr + wide_row * cols
    dy_offset = (beside.to(tl.int64) * dy_stride)[:, None] + col[None, :]
    dx_offset = (beside.to(tl.int64) * cols)[:, None] + col[None, :]
    # Two rows of a tile lie in the same threads: added at once, they are one sum in the registers.
    SUMS: tl.constexpr = 1 if BLOCK_ROWS == 2 else BLOCK_ROWS
    dbias = tl.zeros([SUMS, BLOCK_COLS], tl.float32)
    next_dy = tl.load(dy_at + dy_offset, mask=(beside < rows - first_row)[:, None] & inside, other=0.0)
    for first in range(first_row, rows, step):
        # The next rows are on their way while this mask is drawn.
        dx = next_dy.to(tl.float32)
        dy_at += wide_step * dy_stride
        next_dy = tl.load(dy_at + dy_offset, mask=(beside < rows - first - step)[:, None] & inside, other=0.0)
        tl.debug_barrier()
        held = beside < rows - first
        keep = _keep(
            k0, k1, iteration, sample_ptr, positions_ptr, s, b, held, first_col, cols, threshold,
            OCTETS, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        dx = tl.where(keep, dx * scale, 0.0)
        tl.store(dx_at + dx_offset, dx.to(dx_ptr.dtype.element_ty), mask=held[:, None] & inside)
        dx_at += wide_step * cols
        s, b = s + step_s, b + step_b
        s, b = tl.where(b < batch, s, s + 1), tl.where(b < batch, b, b - batch)
        dbias += tl.sum(dx, axis=0, keep_dims=True) if BLOCK_ROWS == 2 else dx
    if partial_ptr is not None:
        tl.store(partial_ptr + split.to(tl.int64) * cols + col, tl.sum(dbias, axis=0), mask=col < cols)


@launchable
@triton.jit
def _bias_gradient_kernel(
    dy_ptr, partial_ptr, rows, cols, dy_stride, splits,
    STRIPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Where nothing was dropped, which leaves dy as it is."""
    split = tl.program_id(0) // STRIPS
    col = tl.program_id(0) % STRIPS * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for first in tl.range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        dbias += whole_rows(dy_ptr, row, dy_stride, col[None, :], rows, cols).to(tl.float32)
    tl.store(partial_ptr + split.to(tl.int64) * cols + col, tl.sum(dbias, axis=0), mask=col < cols)


def forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, key: Tensor | None,
    iteration: Tensor | None, sample_index: Tensor | None, positions: Tensor | None,
) -> Tensor:  # fmt: skip
    """x, residual [S, B, H] -> y [S, B, H] in the residual's dtype. key is None where nothing is dropped."""
    y = contiguous_like(residual)
    if y.numel() == 0:
        return y
    _, batch, cols = x.shape
    x_rows, residual_rows = as_rows(x), as_rows(residual)
    rows, config = x_rows.shape[0], tile_config(cols, warps=4 if key is None else 2)
    strips = ceil_div(cols, config.block_cols)
    with on_device_of(x):
        _bias_dropout_add_fwd_kernel[(strips * ceil_div(rows, config.block_rows),)](
            x_rows, bias, residual_rows, y, key, iteration, sample_index, positions,
            rows, cols, x_rows.stride(0), residual_rows.stride(0), batch, HIDDEN_LANES.threshold(probability),
            HIDDEN_LANES.scale(probability), key is not None, cols % 8 == 0,
            strips, config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return y


def backward(
    dy: Tensor, bias: Tensor | None, main_grad: Tensor | None, probability: float, key: Tensor | None,
    iteration: Tensor | None, sample_index: Tensor | None, positions: Tensor | None, x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx [S, B, H], dbias [H]).

    dx is empty where nothing is dropped (it is dy then), dbias without a bias, and where it was added to
    main_grad.
    """
    dx = dy.new_empty(0, dtype=x_dtype) if key is None else contiguous_like(dy, x_dtype)
    _, batch, cols = dy.shape
    dbias = (dy if bias is None else bias).new_empty(cols if bias is not None and main_grad is None else 0)
    if dy.numel() == 0:
        return dx, dbias.zero_()
    dy_rows = as_rows(dy)
    rows = dy_rows.shape[0]
    config = tile_config(cols, 2048, 512, 2) if key is None else tile_config(cols, 2048)
    strips, splits = ceil_div(cols, config.block_cols), ceil_div(rows, config.block_rows)
    partial = None
    if bias is not None:  # few partial sums, each of a long strip
        programs = num_sms(dy.get_device()) * (SUM_PROGRAMS_PER_SM if key is None else PROGRAMS_PER_SM)
        splits = min(splits, max(1, programs // strips))
        partial = dy.new_empty((splits, cols), dtype=torch.float32)
    tile = strips, config.block_rows, config.block_cols
    with on_device_of(dy):
        if key is not None:
            _bias_dropout_add_bwd_kernel[(strips * splits,)](
                dy_rows, dx, partial, key, iteration, sample_index, positions,
                rows, cols, dy_rows.stride(0), batch, HIDDEN_LANES.threshold(probability),
                HIDDEN_LANES.scale(probability), splits, cols % 8 == 0, *tile, num_warps=config.num_warps,
            )  # fmt: skip
        elif partial is not None:
            _bias_gradient_kernel[(strips * splits,)](
                dy_rows, partial, rows, cols, dy_rows.stride(0), splits, *tile, SUM_STAGES,
                num_warps=config.num_warps,
            )  # fmt: skip
        if partial is not None:
            column_sums(Sum.of(partial, dbias, main_grad))
    return dx, dbias
