"""QK norm in Triton: a row is one head of one token, and a program takes a block of them.

Forward reads q and k inside the merged projection. Backward reads the gradients of q, k and v where
attention left them and writes the gradient of the merged projection once; statistics are made again from the
row, which is in registers anyway. Its programs are shared out among q, k and v in proportion to their heads,
and each keeps its weight gradient in fp32; a second launch adds those in fixed order.
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
    TileConfig,
    ceil_div,
    contiguous_like,
    next_power_of_2,
    num_sms,
    on_device_of,
)
from redline.kernels.triton_common import column_sum

PROGRAMS_PER_SM = 4


@functools.cache
def head_config(head_dim: int) -> TileConfig:
    """2048 elements over 4 warps: 16 a thread, so that several programs fit an SM."""
    block_dim = next_power_of_2(head_dim)
    return TileConfig(max(1, 2048 // block_dim), block_dim, 4)


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
    x_ptr, y_ptr, weight_ptr, bias_ptr, block, rows, heads, x_token, y_token, dim, eps,
    LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Block `block` of the rows (token, head) of q or of k; pointers are those of its first head."""
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_DIM)
    mask = (row < rows)[:, None] & (col < dim)[None, :]
    token, head = (row // heads).to(tl.int64), row % heads
    x = tl.load(x_ptr + (token * x_token + head * dim)[:, None] + col[None, :], mask=mask, other=0.0)
    y, _ = _normalise(x.to(tl.float32), mask, dim, eps, LAYER)
    if weight_ptr is not None:
        weight = _vector(weight_ptr, col, dim)
        y *= weight + 1.0 if ZERO_CENTERED else weight
    if bias_ptr is not None:
        y += _vector(bias_ptr, col, dim)
    target = y_ptr + (token * y_token + head * dim)[:, None] + col[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_fwd_kernel(
    qkv_ptr, y_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, tokens, heads, groups, dim, eps,
    LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    x_token, y_token = (heads + 2 * groups) * dim, (heads + groups) * dim
    q_blocks = tl.cdiv(tokens * heads, BLOCK_ROWS)
    program = tl.program_id(0)
    if program < q_blocks:
        _norm_tile(
            qkv_ptr, y_ptr, q_weight_ptr, q_bias_ptr, program, tokens * heads, heads, x_token, y_token,
            dim, eps, LAYER, ZERO_CENTERED, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
    else:
        _norm_tile(
            qkv_ptr + heads * dim, y_ptr + heads * dim, k_weight_ptr, k_bias_ptr, program - q_blocks,
            tokens * groups, groups, x_token, y_token, dim, eps,
            LAYER, ZERO_CENTERED, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip


@triton.jit
def _grad_strip(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, partial_ptr, program, programs, rows, heads, batch,
    dy_s, dy_b, dy_head, x_token, dim, eps,
    NORM: tl.constexpr, LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Every `programs`-th block of the rows of q, k or (NORM False: a copy) v."""
    col = tl.arange(0, BLOCK_DIM)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(program * BLOCK_ROWS, rows, programs * BLOCK_ROWS, num_stages=3):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (col < dim)[None, :]
        token, head = row // heads, (row % heads).to(tl.int64)
        s, b = (token // batch).to(tl.int64), (token % batch).to(tl.int64)
        source = dy_ptr + (s * dy_s + b * dy_b + head * dy_head)[:, None] + col[None, :]
        dx = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        place = (token.to(tl.int64) * x_token + head * dim)[:, None] + col[None, :]
        if NORM:
            x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
            x_hat, rstd = _normalise(x, mask, dim, eps, LAYER)
            if weight_ptr is not None:
                dweight += dx * x_hat
                dbias += dx
                weight = _vector(weight_ptr, col, dim)
                dx *= weight + 1.0 if ZERO_CENTERED else weight
            along = tl.sum(dx * x_hat, axis=1)[:, None] / dim
            if LAYER:
                dx -= tl.sum(dx, axis=1)[:, None] / dim
            dx = rstd * (dx - x_hat * along)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NORM and weight_ptr is not None:
        tl.store(partial_ptr + col, tl.sum(dweight, axis=0), mask=col < dim)
        tl.store(partial_ptr + dim + col, tl.sum(dbias, axis=0), mask=col < dim)


@triton.jit
def _qk_norm_bwd_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, dqkv_ptr, q_weight_ptr, k_weight_ptr, partial_ptr,
    q_programs, k_programs, tokens, batch, heads, groups, dim, eps,
    q_s, q_b, q_head, k_s, k_b, k_head, v_s, v_b, v_head,
    LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """partial [q_programs + k_programs, 2, D]: a program's gradients of its weight and of its bias."""
    program = tl.program_id(0)
    partial = partial_ptr
    if partial_ptr is not None:
        partial = partial_ptr + program * (2 * dim)
    token = (heads + 2 * groups) * dim
    k_place, v_place = heads * dim, (heads + groups) * dim
    if program < q_programs:
        _grad_strip(
            dq_ptr, qkv_ptr, dqkv_ptr, q_weight_ptr, partial, program, q_programs, tokens * heads, heads,
            batch, q_s, q_b, q_head, token, dim, eps, True, LAYER, ZERO_CENTERED, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
    elif program < q_programs + k_programs:
        _grad_strip(
            dk_ptr, qkv_ptr + k_place, dqkv_ptr + k_place, k_weight_ptr, partial, program - q_programs,
            k_programs, tokens * groups, groups, batch, k_s, k_b, k_head, token, dim, eps,
            True, LAYER, ZERO_CENTERED, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
    else:
        first = q_programs + k_programs
        _grad_strip(
            dv_ptr, qkv_ptr + v_place, dqkv_ptr + v_place, None, None, program - first,
            tl.num_programs(0) - first, tokens * groups, groups, batch, v_s, v_b, v_head, token, dim, eps,
            False, LAYER, ZERO_CENTERED, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip


def forward(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None,
    num_heads: int, num_groups: int, head_dim: int, layer: bool, eps: float, zero_centered: bool,
) -> Tensor:  # fmt: skip
    """qkv [S, B, (N + 2G) D] contiguous -> [S, B, N + G, D]: the normalised heads of q, then those of k."""
    S, B, _ = qkv.shape
    y = torch.empty((S, B, num_heads + num_groups, head_dim), dtype=qkv.dtype, device=qkv.device)
    if y.numel() == 0:
        return y
    config = head_config(head_dim)
    blocks = ceil_div(S * B * num_heads, config.block_rows) + ceil_div(S * B * num_groups, config.block_rows)
    with on_device_of(qkv):
        _qk_norm_fwd_kernel[(blocks,)](
            qkv, y, q_weight, k_weight, q_bias, k_bias, S * B, num_heads, num_groups, head_dim, eps,
            layer, zero_centered, config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return y


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


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
    dq, dk, dv = _unit_stride(dq), _unit_stride(dk), _unit_stride(dv)
    config = head_config(dim)
    share = PROGRAMS_PER_SM * num_sms(qkv.get_device()) / (heads + 2 * groups)
    q_programs = min(ceil_div(tokens * heads, config.block_rows), max(1, int(share * heads)))
    k_programs = min(ceil_div(tokens * groups, config.block_rows), max(1, int(share * groups)))
    partial = None
    if q_weight is not None:
        partial = torch.empty((q_programs + k_programs, 2, dim), dtype=torch.float32, device=qkv.device)
    with on_device_of(qkv):
        _qk_norm_bwd_kernel[(q_programs + 2 * k_programs,)](
            dq, dk, dv, qkv, dqkv, q_weight, k_weight, partial, q_programs, k_programs, tokens, B,
            heads, groups, dim, eps, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            layer, zero_centered, config.block_rows, config.block_cols, num_warps=config.num_warps,
        )  # fmt: skip
        if partial is not None:
            parts = (
                partial[:q_programs, 0],
                partial[q_programs:, 0],
                partial[:q_programs, 1],
                partial[q_programs:, 1],
            )
            for vector, main_grad, grad, part in zip(vectors, main_grads, grads, parts, strict=True):
                if vector is not None:
                    column_sum(part, grad if main_grad is None else main_grad, main_grad is not None)
    return dqkv, *grads  # type: ignore[return-value]
