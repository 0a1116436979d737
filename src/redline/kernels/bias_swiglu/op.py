"""Bias + SwiGLU as an operator: what it supports, its autograd, the choice of kernel or reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
from redline.kernels.bias_swiglu.reference import bias_swiglu_reference
from redline.kernels.common import Impl, accumulate_into, apply, lazily, operator, use_triton, why_not


def supports(x: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    return why_not(x, bias)


def _forward_fake(x: Tensor, bias: Tensor | None, clamp: float | None, offset: float) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, clamp: float | None, offset: float
) -> tuple[Tensor, Tensor]:
    like = x if bias is None else bias
    return x.new_empty(x.shape), like.new_empty(0 if bias is None or main_grad is not None else x.shape[-1])


_KERNEL = "redline.kernels.bias_swiglu.kernel"
_forward = operator(
    "bias_swiglu_fwd(Tensor x, Tensor? bias, float? clamp, float offset) -> Tensor",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_backward = operator(
    "bias_swiglu_bwd(Tensor dy, Tensor x, Tensor? bias, Tensor(a!)? main_grad, float? clamp, float offset)"
    " -> (Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


class BiasSwiGLUFn(torch.autograd.Function):
    """Saves the input and the bias; main_grad (of the bias) rides on ctx as an attribute."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, clamp: float | None, offset: float
    ) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.main_grad, ctx.clamp, ctx.offset = main_grad, clamp, offset
        y: Tensor = _forward(x, bias, clamp, offset)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = _backward(dy, x, bias, ctx.main_grad, ctx.clamp, ctx.offset)
        return dx, None if bias is None or ctx.main_grad is not None else dbias, None, None, None


def bias_swiglu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    clamp: float | None = None,
    offset: float = 0.0,
    main_grad: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """y = silu(gate) * (up + offset), [gate | up] = x + bias; fp32 inside, rounded once.

    Shapes: x [..., 2F] of any strides (copied where rows have none in common), bias [2F] -> [..., F].
    Args:
        clamp: limit of gate from above and of up on both sides, before the activation.
        main_grad: [2F] buffer to which the bias's gradient is added; the bias then gets none of its own.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    if not (x.dim() > 0 and x.shape[-1] > 0 and x.shape[-1] % 2 == 0):
        raise ShapeError(
            f"bias_swiglu: the last dim of x {tuple(x.shape)} is not even.",
            "it holds gate and up side by side.",
        )
    if not (bias is None or (bias.shape == x.shape[-1:] and bias.is_contiguous())):
        raise ShapeError(
            f"bias_swiglu: the bias does not fit x {tuple(x.shape)}.",
            "the bias is one contiguous vector as long as x's last dim.",
        )
    if use_triton("bias_swiglu", impl, supports(x, bias)):
        y: Tensor = apply(BiasSwiGLUFn, x, bias, main_grad, clamp, offset)
        return y
    return bias_swiglu_reference(x, None if bias is None else accumulate_into(bias, main_grad), clamp, offset)
