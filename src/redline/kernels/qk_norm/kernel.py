"""QK norm in Triton: a row is one head of one token, and a program takes tiles of them.

A tile is a few neighbouring heads of a few neighbouring tokens. The heads of a tile are a power of 2 that
divides both numbers of heads, so that finding a row's place takes shifts instead of divisions.

Forward reads q and k inside the merged projection. Backward reads the gradients of q, k and v where
attention left them and writes the gradient of the merged projection once; statistics are made again from the
row, which is in registers anyway. Its programs are shared out among q, k and v in proportion to their heads,
fetch a tile ahead, and keep their weight gradient in fp32; a second launch adds those in fixed order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import (
    ceil_div,
    contiguous_like,
    next_power_of_2,
    num_sms,
    on_device_of,
    unit_stride,
)
from redline.kernels.launch import launchable
from redline.kernels.triton_common import Sum, column_sums

# By bias: what registers allow, at least 32 KiB in flight as in norm_triton. Without, on an H200: 5 take
# 234 us, 6 and 7 take 227, 8 take 240.
PROGRAMS_PER_SM = {False: 6, True: 4}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Launch choices: rows of a tile, heads among them, padded channels, warps."""

    block_rows: int
    block_heads: int
    block_dim: int
    num_warps: int


@functools.cache
def head_config(num_heads: int, num_groups: int, head_dim: int) -> HeadConfig:
    """2048 elements over 4 warps: 16 a thread, so that several programs fit an SM.

    On an H200 16 heads of 128 a tile take 227 us, 8 take 255, 32 take 243.
    """
    block_dim = next_power_of_2(head_dim)
    block_rows = max(1, 2048 // block_dim)
    common = math.gcd(num_heads, num_groups)
    return HeadConfig(block_rows, min(block_rows, common & -common), block_dim, 4)


@triton.jit
def _rows(tile, head_blocks, HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """(token, head) of each row of a tile; heads run fastest, then tokens."""
    lane = tl.arange(0, BLOCK_ROWS)
    token = tile // head_blocks * (BLOCK_ROWS // HEADS) + lane // HEADS
    return token, tile % head_blocks * HEADS + lane % HEADS


@triton.jit
def _place(token, head, batch, stride_s, stride_b, stride_head):
    """Offset of each row; tokens are (s, b) with b fastest. Division goes where the batch is a constant 1."""
    s, b = (token // batch).to(tl.int64), (token % batch).to(tl.int64)
    return (s * stride_s + b * stride_b + head.to(tl.int64) * stride_head)[:, None]


@triton.jit
def _normalise(x, mask, dim, eps, LAYER: tl.constexpr):
    """(x_hat, rstd [rows, 1]) of rows of `dim` channels; masked channels are 0."""
    if LAYER:
        x = tl.where(mask, x - tl.sum(x, axis=1)[:, None] / dim, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / dim + eps)
    return x * rstd, rstd


@triton.jit
def _vector(ptr, col, dim):
    return tl.load(ptr + col, mask=col < dim, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _norm_tile(
    x_ptr, y_ptr, weight_ptr, bias_ptr, tile, tokens, heads, x_token, dim, eps,
    LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One tile of q or of k; x_ptr is its first head inside the projection, y is [tokens, heads, dim]."""
    token, head = _rows(tile, heads // HEADS, HEADS, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_DIM)
    mask = (token < tokens)[:, None] & (col < dim)[None, :]
    x = tl.load(x_ptr + _place(token, head, 1, x_token, 0, dim) + col[None, :], mask=mask, other=0.0)
    y, _ = _normalise(x.to(tl.float32), mask, dim, eps, LAYER)
    if weight_ptr is not None:
        weight = _vector(weight_ptr, col, dim)
        y *= weight + 1.0 if ZERO_CENTERED else weight
    if bias_ptr is not None:
        y += _vector(bias_ptr, col, dim)
    target = y_ptr + _place(token, head, 1, heads * dim, 0, dim) + col[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)


@launchable
@triton.jit
def _qk_norm_fwd_kernel(
    qkv_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr,
    q_tiles, tokens, heads, groups, dim, eps, LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    x_token = (heads + 2 * groups) * dim
    program = tl.program_id(0)
    if program < q_tiles:
        _norm_tile(
            qkv_ptr, q_ptr, q_weight_ptr, q_bias_ptr, program, tokens, heads, x_token, dim, eps,
            LAYER, ZERO_CENTERED, HEADS, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
    else:
        _norm_tile(
            qkv_ptr + heads * dim, k_ptr, k_weight_ptr, k_bias_ptr, program - q_tiles, tokens, groups,
            x_token, dim, eps, LAYER, ZERO_CENTERED, HEADS, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip


@triton.jit
def _grad_strip(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, partial_ptr, program, programs, tokens, heads, batch,
    dy_s, dy_b, dy_head, x_token, dim, eps,
    NORM: tl.constexpr, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Every `programs`-th tile of q, k or (NORM False: a copy) v."""
    col = tl.arange(0, BLOCK_DIM)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    if weight_ptr is not None:
        weight = _vector(weight_ptr, col, dim)
        gain = weight + 1.0 if ZERO_CENTERED else weight
    head_blocks = heads // HEADS
    tiles = tl.cdiv(tokens, BLOCK_ROWS // HEADS) * head_blocks
    token, head = _rows(program, head_blocks, HEADS, BLOCK_ROWS)
    mask = (token < tokens)[:, None] & (col < dim)[None, :]
    place = _place(token, head, 1, x_token, 0, dim) + col[None, :]
    dy = tl.load(
        dy_ptr + _place(token, head, batch, dy_s, dy_b, dy_head) + col[None, :], mask=mask, other=0.0
    )
    if NORM:
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
    for tile in range(program, tiles, programs):
        # The next tile is on its way while this one is summed.
        token, head = _rows(tile + programs, head_blocks, HEADS, BLOCK_ROWS)
        next_mask = (token < tokens)[:, None] & (col < dim)[None, :]
        next_place = _place(token, head, 1, x_token, 0, dim) + col[None, :]
        source = dy_ptr + _place(token, head, batch, dy_s, dy_b, dy_head) + col[None, :]
        next_dy = tl.load(source, mask=next_mask, other=0.0)
        dx = dy.to(tl.float32)
        if NORM:
            next_x = tl.load(x_ptr + next_place, mask=next_mask, other=0.0)
            x_hat, rstd = _normalise(x.to(tl.float32), mask, dim, eps, LAYER)
            if weight_ptr is not None:
                dweight += dx * x_hat
                if HAS_BIAS:
                    dbias += dx
                dx *= gain
            along = tl.sum(dx * x_hat, axis=1)[:, None] / dim
            if LAYER:
                dx -= tl.sum(dx, axis=1)[:, None] / dim
            dx = rstd * (dx - x_hat * along)
            x = next_x
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dy, mask, place = next_dy, next_mask, next_place
    if NORM and weight_ptr is not None:
        tl.store(partial_ptr + col, tl.sum(dweight, axis=0), mask=col < dim)
        if HAS_BIAS:
            tl.store(partial_ptr + dim + col, tl.sum(dbias, axis=0), mask=col < dim)


@launchable
@triton.jit
def _qk_norm_bwd_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, dqkv_ptr, q_weight_ptr, k_weight_ptr, partial_ptr,
    q_programs, k_programs, tokens, batch, heads, groups, dim, eps,
    q_s, q_b, q_head, k_s, k_b, k_head, v_s, v_b, v_head,
    LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    token = (heads + 2 * groups) * dim
    k_place, v_place = heads * dim, (heads + groups) * dim
    program = tl.program_id(0)
    partial = partial_ptr
    if partial_ptr is not None:
        partial += program * (2 * dim)
    if program < q_programs:
        _grad_strip(
            dq_ptr, qkv_ptr, dqkv_ptr, q_weight_ptr, partial, program, q_programs, tokens, heads,
            batch, q_s, q_b, q_head, token, dim, eps,
            True, LAYER, HAS_BIAS, ZERO_CENTERED, HEADS, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
    elif program < q_programs + k_programs:
        _grad_strip(
            dk_ptr, qkv_ptr + k_place, dqkv_ptr + k_place, k_weight_ptr, partial, program - q_programs,
            k_programs, tokens, groups, batch, k_s, k_b, k_head, token, dim, eps,
            True, LAYER, HAS_BIAS, ZERO_CENTERED, HEADS, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
    else:
        first = q_programs + k_programs
        _grad_strip(
            dv_ptr, qkv_ptr + v_place, dqkv_ptr + v_place, None, None, program - first,
            tl.num_programs(0) - first, tokens, groups, batch, v_s, v_b, v_head, token, dim, eps,
            False, LAYER, HAS_BIAS, ZERO_CENTERED, HEADS, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip


def forward(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None,
    num_heads: int, num_groups: int, head_dim: int, layer: bool, eps: float, zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """qkv [S, B, (N + 2G) D] contiguous -> the normalised q [S, B, N, D] and k [S, B, G, D]."""
    S, B, _ = qkv.shape
    q = qkv.new_empty(S, B, num_heads, head_dim)
    k = qkv.new_empty(S, B, num_groups, head_dim)
    if qkv.numel() == 0:
        return q, k
    config = head_config(num_heads, num_groups, head_dim)
    token_blocks = ceil_div(S * B, config.block_rows // config.block_heads)
    q_tiles, k_tiles = (token_blocks * (n // config.block_heads) for n in (num_heads, num_groups))
    with on_device_of(qkv):
        _qk_norm_fwd_kernel[(q_tiles + k_tiles,)](
            qkv, q, k, q_weight, k_weight, q_bias, k_bias, q_tiles, S * B, num_heads, num_groups, head_dim,
            eps, layer, zero_centered, config.block_heads, config.block_rows, config.block_dim,
            num_warps=config.num_warps,
        )  # fmt: skip
    return q, k


def _as_tokens(*grads: Tensor) -> tuple[int, list[tuple[int, ...]]]:
    """(batch, strides of s, b and head of each): batch 1 where s and b of all are as one dimension."""
    S, B = grads[0].shape[:2]
    strides = [grad.stride()[:3] for grad in grads]
    if B > 1 and S > 1 and any(s != B * b for s, b, _ in strides):
        return B, strides
    return 1, [(b if B > 1 else s, 0, head) for s, b, head in strides]


def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None,
    q_weight_main_grad: Tensor | None, k_weight_main_grad: Tensor | None,
    q_bias_main_grad: Tensor | None, k_bias_main_grad: Tensor | None,
    layer: bool, eps: float, zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dqkv and the four vectors' gradients; one is empty for no vector, and if added to its main grad."""
    S, B, heads, dim = dq.shape
    groups, tokens = dk.shape[2], S * B
    dqkv = contiguous_like(qkv)
    vectors = (q_weight, k_weight, q_bias, k_bias)
    main_grads = (q_weight_main_grad, k_weight_main_grad, q_bias_main_grad, k_bias_main_grad)
    grads = [
        qkv.new_empty(0) if v is None or g is not None else torch.empty_like(v)
        for v, g in zip(vectors, main_grads, strict=True)
    ]
    if qkv.numel() == 0:
        return dqkv, *(grad.zero_() for grad in grads)  # type: ignore[return-value]
    dq, dk, dv = unit_stride(dq), unit_stride(dk), unit_stride(dv)
    batch, (q_strides, k_strides, v_strides) = _as_tokens(dq, dk, dv)
    config = head_config(heads, groups, dim)
    token_blocks = ceil_div(tokens, config.block_rows // config.block_heads)
    share = PROGRAMS_PER_SM[q_bias is not None] * num_sms(qkv.get_device()) / (heads + 2 * groups)
    q_programs, k_programs = (
        min(token_blocks * (n // config.block_heads), max(1, int(share * n))) for n in (heads, groups)
    )
    partial = None
    if q_weight is not None:
        partial = qkv.new_empty((q_programs + k_programs, 2, dim), dtype=torch.float32)
    with on_device_of(qkv):
        _qk_norm_bwd_kernel[(q_programs + 2 * k_programs,)](
            dq, dk, dv, qkv, dqkv, q_weight, k_weight, partial, q_programs, k_programs, tokens, batch,
            heads, groups, dim, eps, *q_strides, *k_strides, *v_strides, layer, q_bias is not None,
            zero_centered, config.block_heads, config.block_rows, config.block_dim,
            num_warps=config.num_warps,
        )  # fmt: skip
        if partial is not None:
            q_part, k_part = partial[:q_programs], partial[q_programs:]
            parts = (q_part[:, 0], k_part[:, 0], q_part[:, 1], k_part[:, 1])
            sums = [Sum.of(*each) for each in zip(parts, grads, main_grads, strict=True)]
            column_sums(*sums[:2])
            if q_bias is not None:
                column_sums(*sums[2:])
    return dqkv, *grads  # type: ignore[return-value]
