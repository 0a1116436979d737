"""Rotary position embedding as an operator: support, autograd, the choice of kernel or reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
from redline.kernels.common import INTEGERS, Impl, apply, lazily, operator, split_qkv, use_triton, why_not
from redline.kernels.rotary.reference import rotary_reference


def supports(x: Tensor, cos_PR: Tensor, sin_PR: Tensor, k: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    for table in (cos_PR, sin_PR):
        if table.dtype != torch.float32:
            return f"a table of angles is {table.dtype}, the kernel reads fp32"
    return why_not(x, cos_PR, sin_PR, k)


def _rotate_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotate_qkv_fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, rotated: int, dim: int
) -> None:
    return None


def _merge_grad_fake(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> Tensor:
    S, B, heads, dim = dq.shape
    return dq.new_empty((S, B, (heads + 2 * dk.shape[2]) * dim))


_KERNEL = "redline.kernels.rotary.kernel"
_TABLE = "Tensor cos, Tensor sin, Tensor? positions, bool interleaved"
_rotate = operator(
    f"rotary(Tensor q, Tensor k, {_TABLE}, bool inverse) -> (Tensor, Tensor)",
    lazily(_KERNEL, "rotate"),
    _rotate_fake,
)
_rotate_qkv = operator(
    f"rotary_qkv_(Tensor(a!) qkv, {_TABLE}, int rotated, int dim) -> ()",
    lazily(_KERNEL, "rotate_qkv"),
    _rotate_qkv_fake,
)
_merge_grad = operator(
    f"rotary_qkv_bwd(Tensor dq, Tensor dk, Tensor dv, {_TABLE}) -> Tensor",
    lazily(_KERNEL, "merge_grad"),
    _merge_grad_fake,
)


class RotaryFn(torch.autograd.Function):
    """Saves the table only; backward turns the other way."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        q_out, k_out = _rotate(q, k, cos, sin, positions, interleaved, False)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        dq, dk = _rotate(dq, dk, cos, sin, positions, ctx.interleaved, True)
        return dq, dk, None, None, None, None


class RotaryQKVFn(torch.autograd.Function):
    """Turns q and k inside qkv, which is a buffer that nothing else reads, and hands out views of it.

    Backward makes the one gradient of qkv, so that splitting costs no concatenation.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool,
        sizes: tuple[int, int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        num_heads, num_groups, head_dim = sizes
        _rotate_qkv(qkv, cos, sin, positions, interleaved, num_heads + num_groups, head_dim)
        return split_qkv(qkv, *sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        dqkv = _merge_grad(dq, dk, dv, cos, sin, positions, ctx.interleaved)
        return dqkv, None, None, None, None, None


def _check(
    op: str,
    S: int,
    B: int,
    head_dim: int,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_SB: Tensor | None,
    R2: int,
) -> None:
    shape = cos_PR.shape
    fits = len(shape) == 2 and shape == sin_PR.shape and cos_PR.is_contiguous() and sin_PR.is_contiguous()
    if not fits:
        raise ShapeError(
            f"{op}: cos {tuple(cos_PR.shape)} and sin {tuple(sin_PR.shape)} do not fit.",
            "each is one contiguous [P, R].",
        )
    if not (0 < R2 <= head_dim and 2 * shape[1] == R2):
        raise ShapeError(
            f"{op}: a table of {shape[1]} angles does not fit {R2} turned channels of {head_dim}.",
            "each pair of channels has one angle.",
            "build the table with rotary_dim / 2 columns.",
        )
    if positions_SB is None:
        if not (shape[0] >= S):
            raise ShapeError(f"{op}: a table of {shape[0]} positions is too short for a sequence of {S}.")
    else:
        if not (positions_SB.shape == (S, B) and positions_SB.dtype in INTEGERS):
            raise ShapeError(
                f"{op}: positions {tuple(positions_SB.shape)} are not integers [S, B] = [{S}, {B}]."
            )


def rotary(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    *,
    rotary_dim: int,
    positions_SB: Tensor | None = None,
    interleaved: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """q and k with the first `rotary_dim` channels of each head turned by their token's angles.

    Shapes: q [S, B, N, D], k [S, B, G, D] of any strides, cos and sin [P, rotary_dim / 2] in fp32 (at least)
        -> the same shapes, contiguous.
    Args:
        positions_SB: integer [S, B], row of the table for each token (packed sequences restart at 0); None:
            the index in the sequence. One outside the table gives NaN, in the reference an IndexError.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    S, B, _, D = q_SBND.shape
    if not (k_SBGD.shape[:2] == (S, B) and k_SBGD.shape[3] == D):
        raise ShapeError(
            f"rotary: q {tuple(q_SBND.shape)} and k {tuple(k_SBGD.shape)} differ in more than heads."
        )
    _check("rotary", S, B, D, cos_PR, sin_PR, positions_SB, rotary_dim)
    if use_triton("rotary", impl, supports(q_SBND, cos_PR, sin_PR, k_SBGD)):
        q, k = apply(RotaryFn, q_SBND, k_SBGD, cos_PR, sin_PR, positions_SB, interleaved)
        return q, k
    return (
        rotary_reference(q_SBND, cos_PR, sin_PR, positions_SB, interleaved),
        rotary_reference(k_SBGD, cos_PR, sin_PR, positions_SB, interleaved),
    )


def rotary_qkv(
    qkv_SBX: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    *,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    rotary_dim: int,
    positions_SB: Tensor | None = None,
    interleaved: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a merged projection into q, k and v with q and k turned; the kernel works in place.

    Shapes: qkv [S, B, (N + 2G) D] contiguous, last dim [q | k | v] -> [S, B, N, D] and two of [S, B, G, D] in
        its dtype, views of qkv where the kernel ran. Do not read qkv afterwards: autograd raises if something
        saved it.
    Otherwise as `rotary`.
    """
    shape = qkv_SBX.shape
    if not (len(shape) == 3 and shape[2] == (num_heads + 2 * num_groups) * head_dim):
        raise ShapeError(
            f"rotary_qkv: {tuple(qkv_SBX.shape)} does not fit heads {num_heads}/{num_groups} of {head_dim}.",
            "its last dim holds the q, then the k, then the v heads.",
        )
    S, B, _ = shape
    _check("rotary_qkv", S, B, head_dim, cos_PR, sin_PR, positions_SB, rotary_dim)
    if use_triton("rotary_qkv", impl, supports(qkv_SBX, cos_PR, sin_PR)):
        if not (qkv_SBX.is_contiguous() and not (qkv_SBX.is_leaf and qkv_SBX.requires_grad)):
            raise ShapeError(
                "rotary_qkv: qkv must be a contiguous intermediate result, since it is changed in place."
            )
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(qkv_SBX)
        sizes = num_heads, num_groups, head_dim
        q, k, v = apply(RotaryQKVFn, qkv_SBX, cos_PR, sin_PR, positions_SB, interleaved, sizes)
        return q, k, v
    q, k, v = split_qkv(qkv_SBX, num_heads, num_groups, head_dim)
    q, k = (rotary_reference(x, cos_PR, sin_PR, positions_SB, interleaved) for x in (q, k))
    return q, k, v
