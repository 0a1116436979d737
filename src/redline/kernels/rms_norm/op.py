"""RMSNorm as an operator: what it supports, its autograd, and the choice between kernel and reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
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
from redline.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

MAX_COLS = 32768  # one row is held by one program


def supports(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    if x.shape[-1] > MAX_COLS:
        return f"a row of {x.shape[-1]} elements is longer than the kernel's {MAX_COLS}"
    return why_not(x, weight, residual)


def _forward_fake(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=out_dtype), rstd


def _add_forward_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _forward_fake(x, weight, eps, zero_centered, out_dtype)
    return y, residual.new_empty(residual.shape), rstd


def _backward_fake(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    main_grad: Tensor | None,
    _: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(0 if main_grad is not None else x.shape[-1])


_KERNEL = "redline.kernels.rms_norm.kernel"
_forward = operator(
    "rms_norm_fwd(Tensor x, Tensor weight, float eps, bool zero_centered, ScalarType out_dtype)"
    " -> (Tensor, Tensor)",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_add_forward = operator(
    "add_rms_norm_fwd(Tensor x, Tensor residual, Tensor weight, float eps, bool zero_centered,"
    " ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    lazily(_KERNEL, "add_forward"),
    _add_forward_fake,
)
_backward = operator(
    "rms_norm_bwd(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor rstd, Tensor(a!)? main_grad,"
    " bool zero_centered) -> (Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


class RMSNormFn(torch.autograd.Function):
    """Saves x (or the sum), the weight and one fp32 number a row; main_grad rides on ctx as an attribute."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor | None, form: tuple[float, bool, torch.dtype]
    ) -> Tensor:
        """`form` is eps, whether the weight is zero-centred, and y's dtype."""
        outputs: tuple[Tensor, Tensor] = _forward(x, weight, *form)
        y, rstd = outputs
        ctx.save_for_backward(x, weight, rstd)
        ctx.main_grad, ctx.zero_centered = main_grad, form[1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = _backward(dy, None, x, weight, rstd, ctx.main_grad, ctx.zero_centered)
        return dx, None if ctx.main_grad is not None else dweight, None, None


class AddRMSNormFn(torch.autograd.Function):
    """As RMSNormFn, with h = x + residual (h = residual without x); backward adds h's other gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, residual: Tensor, weight: Tensor, main_grad: Tensor | None,
        form: tuple[float, bool, torch.dtype],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if x is None:
            y, rstd = _forward(residual, weight, *form)
            total = residual.view_as(residual)
        else:
            y, total, rstd = _add_forward(x, residual, weight, *form)
        ctx.save_for_backward(total, weight, rstd)
        ctx.main_grad, ctx.zero_centered = main_grad, form[1]
        ctx.x_dtype = None if x is None else x.dtype
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dsum: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = _backward(dy, dsum, total, weight, rstd, ctx.main_grad, ctx.zero_centered)
        dweight = None if ctx.main_grad is not None else dweight
        return None if ctx.x_dtype is None else dx.to(ctx.x_dtype), dx, dweight, None, None


def _check(x: Tensor, weight: Tensor) -> None:
    shape = x.shape
    if not (shape and shape[-1] > 0 and weight.shape == (shape[-1],) and weight.is_contiguous()):
        raise ShapeError(
            f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}.",
            "the weight is one contiguous vector as long as x's last dim.",
        )


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
    main_grad: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """y = x * rsqrt(mean(x^2) + eps) * weight (1 + weight when zero-centred); fp32 inside, rounded once.

    Shapes: x [..., H] of any strides (copied where rows have none in common), weight [H] -> [..., H].
    Args:
        main_grad: [H] buffer to which the weight's gradient is added; the weight then gets none of its own.
        out_dtype: dtype of y, x's unless given (a residual stream in fp32 feeding bf16 GEMMs).
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    _check(x, weight)
    if use_triton("rms_norm", impl, supports(x, weight)):
        form = eps, zero_centered, out_dtype or x.dtype
        y: Tensor = apply(RMSNormFn, x, weight, buffer_of(weight, main_grad), form)
        return y
    return rms_norm_reference(x, accumulate_into(weight, main_grad), eps, zero_centered, out_dtype)


def add_rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
    main_grad: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual, in one pass; h has the residual's dtype, y has x's.

    Without x, h is the residual itself: whoever goes on with h instead of it has the gradients of both of its
    readers added in this norm's backward.

    Shapes: x, residual [..., H], weight [H] -> two of [..., H]. Otherwise as `rms_norm`.
    """
    _check(residual, weight)
    if x is not None and x.shape != residual.shape:
        raise ShapeError(
            f"add_rms_norm: x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape."
        )
    if use_triton("add_rms_norm", impl, supports(residual, weight, x)):
        dtype = out_dtype or (residual if x is None else x).dtype
        main_grad, form = buffer_of(weight, main_grad), (eps, zero_centered, dtype)
        y, total = apply(AddRMSNormFn, x, residual, weight, main_grad, form)
        return y, total
    weight = accumulate_into(weight, main_grad)
    return add_rms_norm_reference(x, residual, weight, eps, zero_centered, out_dtype)
