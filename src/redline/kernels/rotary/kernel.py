"""Rotary position embedding in Triton: a program turns a block of heads of one token.

Forward on a merged projection works in place on its q and k heads. Backward reads the gradients of q, k and v
where attention left them and writes the gradient of the merged projection once: no concatenation runs. Where
q and k are tensors of their own, one launch turns both.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import ceil_div, contiguous_like, next_power_of_2, on_device_of, unit_stride
from redline.kernels.launch import launchable


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Launch choices: heads a program, padded sizes of half the turned and of the other channels, warps."""

    block_heads: int
    block_half: int
    block_rest: int
    num_warps: int


@functools.cache
def head_config(num_heads: int, half: int, rest: int) -> HeadConfig:
    """A block of 4 to 16 heads, 16 turned elements a thread, up to 8 warps.

    As many heads as divide their number, but two warps of them: of smaller programs an SM has no room for as
    many as keep memory busy. On an H200 blocks of 8 and 16 heads of 128 take 198 us, at 1, 2 or 4 warps, of
    64 heads 244 and more; of 64 channels 8 heads take 54 us, 16 take 45.
    """
    block_half = next_power_of_2(half)
    block_heads = min(16, max(4, num_heads & -num_heads, 512 // block_half))
    warps = min(8, max(1, block_heads * block_half * 2 // 512))
    return HeadConfig(block_heads, block_half, next_power_of_2(rest) if rest else 0, warps)


def _both_config(heads: int, groups: int, half: int, rest: int) -> HeadConfig:
    """Of q and k together: blocks that divide the heads of k, unless these are too few for the q beside."""
    return head_config(groups if groups >= 4 else heads, half, rest)


@triton.jit
def _angles(
    cos_ptr, sin_ptr, positions_ptr, s, b, table_rows, position_s, position_b,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """cos and sin [BLOCK_HALF] of token (s, b). A position outside the table gives NaN."""
    position = s.to(tl.int64)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + s.to(tl.int64) * position_s + b * position_b).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    inside = (pair < HALF) & (position >= 0) & (position < table_rows)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=inside, other=float("nan"))
    sin = tl.load(sin_ptr + position * HALF + pair, mask=inside, other=float("nan"))
    return cos, sin


@triton.jit
def _turn(
    src_ptr, dst_ptr, src_head, dst_head, head, mask, cos, sin,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Turn heads `head` (int64, valid where `mask`) of one token; src and dst may be the same memory."""
    src = src_ptr + (head * src_head)[:, None]
    dst = dst_ptr + (head * dst_head)[:, None]
    dtype = dst_ptr.dtype.element_ty
    if INTERLEAVED:
        channel = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        valid = mask[:, None] & (channel < 2 * HALF)
        x = tl.load(src + channel, mask=valid, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_HALF, 2]))
        turned = tl.interleave(a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :])
        tl.store(dst + channel, turned.to(dtype), mask=valid)
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        valid = mask[:, None] & (pair < HALF)
        a = tl.load(src + pair, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(src + HALF + pair, mask=valid, other=0.0).to(tl.float32)
        tl.store(dst + pair, (a * cos[None, :] - b * sin[None, :]).to(dtype), mask=valid)
        tl.store(dst + HALF + pair, (b * cos[None, :] + a * sin[None, :]).to(dtype), mask=valid)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        valid = mask[:, None] & (rest < 2 * HALF + REST)
        tl.store(dst + rest, tl.load(src + rest, mask=valid), mask=valid)


@launchable
@triton.jit
def _rotary_kernel(
    q_ptr, q_out_ptr, k_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, batch, heads, groups, table_rows,
    position_s, position_b, q_s, q_b, q_head, k_s, k_b, k_head, q_width, k_width, out_head,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The blocks of a token follow one another, as in memory; tokens of the outputs are `width` apart."""
    BLOCKS: tl.constexpr = Q_BLOCKS + K_BLOCKS
    token, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    s, b = token // batch, token % batch
    cos, sin = _angles(
        cos_ptr, sin_ptr, positions_ptr, s, b, table_rows, position_s, position_b, HALF, BLOCK_HALF
    )
    if INVERSE:
        sin = -sin
    wide_s, wide_b = s.to(tl.int64), b.to(tl.int64)
    lane = tl.arange(0, BLOCK_HEADS).to(tl.int64)
    if K_BLOCKS == 0 or block < Q_BLOCKS:
        head = block * BLOCK_HEADS + lane
        _turn(
            q_ptr + wide_s * q_s + wide_b * q_b, q_out_ptr + token.to(tl.int64) * q_width, q_head, out_head,
            head, head < heads, cos, sin, HALF, REST, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head = (block - Q_BLOCKS) * BLOCK_HEADS + lane
        _turn(
            k_ptr + wide_s * k_s + wide_b * k_b, k_out_ptr + token.to(tl.int64) * k_width, k_head, out_head,
            head, head < groups, cos, sin, HALF, REST, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


@launchable
@triton.jit
def _merge_grad_kernel(
    dq_ptr, dk_ptr, dv_ptr, dst_ptr, cos_ptr, sin_ptr, positions_ptr, batch, heads, groups,
    table_rows, position_s, position_b, q_s, q_b, q_head, k_s, k_b, k_head, v_s, v_b, v_head,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """dst [S, B, N + 2G, D] = [dq turned back | dk turned back | dv]; a program is a block of heads."""
    DIM: tl.constexpr = 2 * HALF + REST
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * K_BLOCKS
    token, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    s, b = token // batch, token % batch
    cos, sin = _angles(
        cos_ptr, sin_ptr, positions_ptr, s, b, table_rows, position_s, position_b, HALF, BLOCK_HALF
    )
    dst_ptr += token.to(tl.int64) * ((heads + 2 * groups) * DIM)
    wide_s, wide_b = s.to(tl.int64), b.to(tl.int64)
    lane = tl.arange(0, BLOCK_HEADS).to(tl.int64)
    if block < Q_BLOCKS:
        head = block * BLOCK_HEADS + lane
        _turn(
            dq_ptr + wide_s * q_s + wide_b * q_b, dst_ptr, q_head, DIM, head, head < heads, cos, -sin,
            HALF, REST, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif block < Q_BLOCKS + K_BLOCKS:
        head = (block - Q_BLOCKS) * BLOCK_HEADS + lane
        _turn(
            dk_ptr + wide_s * k_s + wide_b * k_b, dst_ptr + heads * DIM, k_head, DIM, head, head < groups,
            cos, -sin, HALF, REST, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head = (block - Q_BLOCKS - K_BLOCKS) * BLOCK_HEADS + lane
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        valid = (head < groups)[:, None] & (channel < DIM)
        dv = tl.load(dv_ptr + wide_s * v_s + wide_b * v_b + (head * v_head)[:, None] + channel, mask=valid)
        tl.store(dst_ptr + (heads + groups) * DIM + (head * DIM)[:, None] + channel, dv, mask=valid)


def _strides(positions: Tensor | None) -> tuple[int, int]:
    return (0, 0) if positions is None else (positions.stride(0), positions.stride(1))


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """q [S, B, N, D] and k [S, B, G, D] turned, into new contiguous tensors."""
    q_out, k_out = contiguous_like(q), contiguous_like(k)
    S, B, heads, dim = q.shape
    groups, half = k.shape[2], cos.shape[1]
    if S * B == 0:
        return q_out, k_out
    q, k = unit_stride(q), unit_stride(k)
    rest = dim - 2 * half
    config = _both_config(heads, groups, half, rest)
    q_blocks, k_blocks = ceil_div(heads, config.block_heads), ceil_div(groups, config.block_heads)
    with on_device_of(q):
        _rotary_kernel[(S * B * (q_blocks + k_blocks),)](
            q, q_out, k, k_out, cos, sin, positions, B, heads, groups, cos.shape[0], *_strides(positions),
            *q.stride()[:3], *k.stride()[:3], heads * dim, groups * dim, dim, inverse, interleaved, half,
            rest, q_blocks, k_blocks, config.block_heads, config.block_half, config.block_rest,
            num_warps=config.num_warps,
        )  # fmt: skip
    return q_out, k_out


def rotate_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, rotated: int, dim: int
) -> None:
    """Turn the first `rotated` heads of qkv [S, B, heads * D] (contiguous) in place."""
    if qkv.numel() == 0:
        return
    S, B, width = qkv.shape
    half = cos.shape[1]
    config = head_config(rotated, half, 0)  # the channels that do not turn are in place already
    blocks = ceil_div(rotated, config.block_heads)
    with on_device_of(qkv):
        _rotary_kernel[(S * B * blocks,)](
            qkv, qkv, None, None, cos, sin, positions, B, rotated, 0, cos.shape[0], *_strides(positions),
            B * width, width, dim, 0, 0, 0, width, 0, dim, False, interleaved, half, 0, blocks, 0,
            config.block_heads, config.block_half, config.block_rest, num_warps=config.num_warps,
        )  # fmt: skip


def merge_grad(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> Tensor:
    """Gradient of the merged projection [S, B, (N + 2G) D] from those of its turned q and k, and of v."""
    S, B, heads, dim = dq.shape
    groups, half = dk.shape[2], cos.shape[1]
    dqkv = dq.new_empty((S, B, (heads + 2 * groups) * dim))
    if dqkv.numel() == 0:
        return dqkv
    dq, dk, dv = unit_stride(dq), unit_stride(dk), unit_stride(dv)
    rest = dim - 2 * half
    config = _both_config(heads, groups, half, rest)
    q_blocks, k_blocks = (ceil_div(n, config.block_heads) for n in (heads, groups))
    with on_device_of(dq):
        _merge_grad_kernel[(S * B * (q_blocks + 2 * k_blocks),)](
            dq, dk, dv, dqkv, cos, sin, positions, B, heads, groups, cos.shape[0], *_strides(positions),
            *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], interleaved, half, rest,
            q_blocks, k_blocks, config.block_heads, config.block_half, config.block_rest,
            next_power_of_2(dim), num_warps=config.num_warps,
        )  # fmt: skip
    return dqkv
