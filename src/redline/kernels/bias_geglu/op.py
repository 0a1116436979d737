"""Bias + GEGLU as an operator: what it supports, its autograd, the choice of kernel or reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
from redline.kernels.bias_geglu.reference import FORMS, GeluForm, bias_geglu_reference
from redline.kernels.common import Impl, accumulate_into, apply, lazily, operator, use_triton, why_not


def supports(x: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    return why_not(x, bias)


def _forward_fake(
    x: Tensor, bias: Tensor | None, approximate: str, clamp: float | None, offset: float
) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    approximate: str,
    clamp: float | None,
    offset: float,
) -> tuple[Tensor, Tensor]:
    like = x if bias is None else bias
    return x.new_empty(x.shape), like.new_empty(0 if bias is None or main_grad is not None else x.shape[-1])


_KERNEL = "redline.kernels.bias_geglu.kernel"
_forward = operator(
    "bias_geglu_fwd(Tensor x, Tensor? bias, str approximate, float? clamp, float offset) -> Tensor",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_backward = operator(
    "bias_geglu_bwd(Tensor dy, Tensor x, Tensor? bias, Tensor(a!)? main_grad, str approximate, float? clamp,"
    " float offset) -> (Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


class BiasGEGLUFn(torch.autograd.Function):
    """Saves the input and the bias; main_grad (of the bias) rides on ctx as an attribute."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        approximate: str,
        clamp: float | None,
        offset: float,
    ) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.main_grad, ctx.form = main_grad, (approximate, clamp, offset)
        y: Tensor = _forward(x, bias, approximate, clamp, offset)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = _backward(dy, x, bias, ctx.main_grad, *ctx.form)
        return dx, None if bias is None or ctx.main_grad is not None else dbias, None, None, None, None


def bias_geglu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluForm = "tanh",
    clamp: float | None = None,
    offset: float = 0.0,
    main_grad: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """y = gelu(gate) * (up + offset), [gate | up] = x + bias; fp32 inside, rounded once.

    Shapes: x [..., 2F] of any strides (copied where rows have none in common), bias [2F] -> [..., F].
    Args:
        approximate: gelu's form: "tanh" (Megatron's fused one), "exact" (erf) or "quick" (by sigmoid).
        clamp: limit of gate from above and of up on both sides, before the activation.
        main_grad: [2F] buffer to which the bias's gradient is added; the bias then gets none of its own.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    if not (x.dim() > 0 and x.shape[-1] > 0 and x.shape[-1] % 2 == 0):
        raise ShapeError(
            f"bias_geglu: the last dim of x {tuple(x.shape)} is not even.",
            "it holds gate and up side by side.",
        )
    if not (bias is None or (bias.shape == x.shape[-1:] and bias.is_contiguous())):
        raise ShapeError(
            f"bias_geglu: the bias does not fit x {tuple(x.shape)}.",
            "the bias is one contiguous vector as long as x's last dim.",
        )
    if approximate not in FORMS:
        raise ShapeError(f"bias_geglu: approximate={approximate!r} is not one of {FORMS}.")
    if use_triton("bias_geglu", impl, supports(x, bias)):
        y: Tensor = apply(BiasGEGLUFn, x, bias, main_grad, approximate, clamp, offset)
        return y
    bias = None if bias is None else accumulate_into(bias, main_grad)
    return bias_geglu_reference(x, bias, approximate, clamp, offset)
