"""Bias + dropout + residual as an operator: support, autograd, the choice of kernel or reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
from redline.kernels.bias_dropout_add.reference import DropoutKey, bias_dropout_add_reference
from redline.kernels.common import (
    Impl,
    accumulate_into,
    apply,
    buffer_of,
    lazily,
    operator,
    use_triton,
    why_not,
)


def supports(x_SBH: Tensor, bias_H: Tensor | None, residual_SBH: Tensor) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    return why_not(x_SBH, bias_H, residual_SBH)


def _forward_fake(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, key: Tensor | None,
    iteration: Tensor | None, sample_index: Tensor | None, positions: Tensor | None,
) -> Tensor:  # fmt: skip
    return residual.new_empty(residual.shape)


def _backward_fake(
    dy: Tensor, bias: Tensor | None, main_grad: Tensor | None, probability: float, key: Tensor | None,
    iteration: Tensor | None, sample_index: Tensor | None, positions: Tensor | None, x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx = dy.new_empty(dy.shape if key is not None else 0, dtype=x_dtype)
    like = dy if bias is None else bias
    return dx, like.new_empty(dy.shape[-1] if bias is not None and main_grad is None else 0)


_KERNEL = "redline.kernels.bias_dropout_add.kernel"
_MASK = "float probability, Tensor? key, Tensor? iteration, Tensor? sample_index, Tensor? positions"
_forward = operator(
    f"bias_dropout_add_fwd(Tensor x, Tensor? bias, Tensor residual, {_MASK}) -> Tensor",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_backward = operator(
    f"bias_dropout_add_bwd(Tensor dy, Tensor? bias, Tensor(a!)? main_grad, {_MASK}, ScalarType x_dtype)"
    " -> (Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


class BiasDropoutAddFn(torch.autograd.Function):
    """Saves the bias and what the mask is a function of, no activation; the bias's main_grad rides on ctx."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, main_grad: Tensor | None,
        probability: float, key: Tensor | None, iteration: Tensor | None,
        sample_index: Tensor | None, positions: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(bias, key, iteration, sample_index, positions)
        ctx.main_grad, ctx.probability, ctx.x_dtype = main_grad, probability, x.dtype
        y: Tensor = _forward(x, bias, residual, probability, key, iteration, sample_index, positions)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        bias, key, iteration, sample_index, positions = ctx.saved_tensors
        dx, dbias = dy, None
        if bias is not None or key is not None:
            draw = (ctx.probability, key, iteration, sample_index, positions)
            dropped, dbias = _backward(dy, bias, ctx.main_grad, *draw, ctx.x_dtype)
            dx = dy if key is None else dropped
        if bias is None or ctx.main_grad is not None:
            dbias = None
        return dx.to(ctx.x_dtype), dbias, dy, None, None, None, None, None, None


def bias_dropout_add(
    x_SBH: Tensor,
    bias_H: Tensor | None,
    residual_SBH: Tensor,
    probability: float = 0.0,
    draw: DropoutKey | None = None,
    *,
    main_grad: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """residual + dropout(x + bias), in the residual's dtype; fp32 inside, rounded once.

    Shapes: x, residual [S, B, H] of any strides (copied where rows have none in common), bias [H].
    Args:
        probability: of dropping an element, applied in steps of 2^-16, survivors scaled by what is applied;
            0 (or no draw: evaluation) drops nothing.
        draw: what the mask is a function of. The iteration is a tensor on the device, so that a CUDA graph
            and a compiled graph serve every step; it must keep its value until backward has run.
        main_grad: [H] buffer to which the bias's gradient is added; the bias then gets none of its own.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    if not (x_SBH.dim() == 3 and x_SBH.shape == residual_SBH.shape):
        raise ShapeError(
            f"bias_dropout_add: x {tuple(x_SBH.shape)} and residual {tuple(residual_SBH.shape)} do not fit.",
            "both are [S, B, H].",
        )
    if not (bias_H is None or (bias_H.shape == x_SBH.shape[-1:] and bias_H.is_contiguous())):
        raise ShapeError(
            f"bias_dropout_add: the bias does not fit x {tuple(x_SBH.shape)}.",
            "the bias is one contiguous vector as long as x's last dim.",
        )
    if not (0.0 <= probability < 1.0):
        raise ShapeError(f"bias_dropout_add: probability {probability} is not in [0, 1).")
    if probability == 0.0:
        draw = None
    if draw is not None:
        _check_draw(draw, x_SBH)
    if use_triton("bias_dropout_add", impl, supports(x_SBH, bias_H, residual_SBH)):
        where = (
            (None, None, None, None)
            if draw is None
            else (draw.key, draw.iteration, draw.sample_index_B, draw.positions_S)
        )
        main_grad = buffer_of(bias_H, main_grad)
        y: Tensor = apply(BiasDropoutAddFn, x_SBH, bias_H, residual_SBH, main_grad, probability, *where)
        return y
    bias = None if bias_H is None else accumulate_into(bias_H, main_grad)
    return bias_dropout_add_reference(x_SBH, bias, residual_SBH, probability, draw)


def _check_draw(draw: DropoutKey, x_SBH: Tensor) -> None:
    """The kernel reads these by pointer: shape, dtype, strides and device must be what it takes them for."""
    S, B, _ = x_SBH.shape
    wanted = ((draw.key, 2), (draw.iteration, 1), (draw.sample_index_B, B), (draw.positions_S, S))
    for tensor, numel in wanted:
        if not (
            tensor is None
            or (
                tensor.numel() == numel
                and tensor.dtype == torch.int64
                and tensor.device == x_SBH.device
                and tensor.is_contiguous()
            )
        ):
            raise ShapeError(
                "bias_dropout_add: a tensor of the dropout key does not fit.",
                "key [2], iteration [], sample_index [B], positions [S] are contiguous int64 on x's device.",
            )
