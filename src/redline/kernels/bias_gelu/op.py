"""Bias + GELU as an operator: what it supports, its autograd, the choice of kernel or reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
from redline.kernels.bias_gelu.reference import FORMS, GeluForm, bias_gelu_reference
from redline.kernels.common import Impl, accumulate_into, apply, lazily, operator, use_triton, why_not


def supports(x: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    return why_not(x, bias)


def _forward_fake(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return x.new_empty(x.shape)


def _backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, approximate: str
) -> tuple[Tensor, Tensor]:
    like = x if bias is None else bias
    return x.new_empty(x.shape), like.new_empty(0 if bias is None or main_grad is not None else x.shape[-1])


_KERNEL = "redline.kernels.bias_gelu.kernel"
_forward = operator(
    "bias_gelu_fwd(Tensor x, Tensor? bias, str approximate) -> Tensor",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_backward = operator(
    "bias_gelu_bwd(Tensor dy, Tensor x, Tensor? bias, Tensor(a!)? main_grad, str approximate)"
    " -> (Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


class BiasGELUFn(torch.autograd.Function):
    """Saves the input and the bias; main_grad (of the bias) rides on ctx as an attribute."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, approximate: str
    ) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.main_grad, ctx.approximate = main_grad, approximate
        y: Tensor = _forward(x, bias, approximate)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = _backward(dy, x, bias, ctx.main_grad, ctx.approximate)
        return dx, None if bias is None or ctx.main_grad is not None else dbias, None, None


def bias_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluForm = "tanh",
    main_grad: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """y = gelu(x + bias); fp32 inside, rounded once.

    Shapes: x [..., F] of any strides (copied where rows have none in common), bias [F] -> [..., F].
    Args:
        approximate: gelu's form: "tanh" (Megatron's fused one), or "exact" (erf).
        main_grad: [F] buffer to which the bias's gradient is added; the bias then gets none of its own.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    if not (x.dim() > 0 and x.shape[-1] > 0):
        raise ShapeError(f"bias_gelu: x {tuple(x.shape)} has no last dim to work on.")
    if not (bias is None or (bias.shape == x.shape[-1:] and bias.is_contiguous())):
        raise ShapeError(
            f"bias_gelu: the bias does not fit x {tuple(x.shape)}.",
            "the bias is one contiguous vector as long as x's last dim.",
        )
    if approximate not in FORMS:
        raise ShapeError(f"bias_gelu: approximate={approximate!r} is not one of {FORMS}.")
    if use_triton("bias_gelu", impl, supports(x, bias)):
        y: Tensor = apply(BiasGELUFn, x, bias, main_grad, approximate)
        return y
    bias = None if bias is None else accumulate_into(bias, main_grad)
    return bias_gelu_reference(x, bias, approximate)
