"""LayerNorm as an operator: support, autograd, the choice of kernel or reference."""

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
from redline.kernels.layer_norm.reference import add_layer_norm_reference, layer_norm_reference

MAX_COLS = 32768  # one row is held by one program


def supports(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    if x.shape[-1] > MAX_COLS:
        return f"a row of {x.shape[-1]} elements is longer than the kernel's {MAX_COLS}"
    return why_not(x, weight, bias, residual)


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape, dtype=out_dtype), mean, rstd


def _add_forward_fake(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y, mean, rstd = _forward_fake(x, weight, bias, eps, zero_centered, out_dtype)
    return y, residual.new_empty(x.shape), mean, rstd


def _backward_fake(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    main_grad: Tensor | None,
    bias_main_grad: Tensor | None,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    cols = x.shape[-1]
    dweight = weight.new_empty(0 if main_grad is not None else cols)
    dbias = weight.new_empty(0) if bias is None or bias_main_grad is not None else bias.new_empty(cols)
    return x.new_empty(x.shape), dweight, dbias


_KERNEL = "redline.kernels.layer_norm.kernel"
_forward = operator(
    "layer_norm_fwd(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered,"
    " ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_add_forward = operator(
    "add_layer_norm_fwd(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps,"
    " bool zero_centered, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    lazily(_KERNEL, "add_forward"),
    _add_forward_fake,
)
_backward = operator(
    "layer_norm_bwd(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " Tensor(a!)? main_grad, Tensor(b!)? bias_main_grad, bool zero_centered) -> (Tensor, Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


def _run_backward(ctx: Any, dy: Tensor, dsum: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dweight and dbias; None for a gradient that went to its main_grad, and for no bias."""
    x, weight, bias, mean, rstd = ctx.saved_tensors
    grads = (ctx.main_grad, ctx.bias_main_grad)
    dx, dweight, dbias = _backward(dy, dsum, x, weight, bias, mean, rstd, *grads, ctx.zero_centered)
    return (
        dx,
        None if ctx.main_grad is not None else dweight,
        None if bias is None or ctx.bias_main_grad is not None else dbias,
    )


class LayerNormFn(torch.autograd.Function):
    """Saves x (or the sum), weight, bias and two fp32 numbers a row; main grads ride on ctx as attributes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None,
        bias_main_grad: Tensor | None, form: tuple[float, bool, torch.dtype],
    ) -> Tensor:  # fmt: skip
        """`form` is eps, whether the weight is zero-centred, and y's dtype."""
        outputs: tuple[Tensor, ...] = _forward(x, weight, bias, *form)
        y, mean, rstd = outputs
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.main_grad, ctx.bias_main_grad, ctx.zero_centered = main_grad, bias_main_grad, form[1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (*_run_backward(ctx, dy, None), None, None, None)


class AddLayerNormFn(torch.autograd.Function):
    """As LayerNormFn, with h = x + residual formed on the way; backward adds h's other gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None,
        bias_main_grad: Tensor | None, form: tuple[float, bool, torch.dtype],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        outputs: tuple[Tensor, ...] = _add_forward(x, residual, weight, bias, *form)
        y, total, mean, rstd = outputs
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        ctx.main_grad, ctx.bias_main_grad, ctx.zero_centered = main_grad, bias_main_grad, form[1]
        ctx.x_dtype = x.dtype
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dsum: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _run_backward(ctx, dy, dsum)
        return dx.to(ctx.x_dtype), dx, dweight, dbias, None, None, None


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    shape = x.shape
    fits = shape and shape[-1] > 0 and weight.shape == (shape[-1],) and weight.is_contiguous()
    if not (fits and (bias is None or (bias.shape == weight.shape and bias.is_contiguous()))):
        raise ShapeError(
            f"layer_norm: weight or bias does not fit x {tuple(x.shape)}.",
            "each is one contiguous vector as long as x's last dim.",
        )


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight (1 + weight when zero-centred) + bias; fp32 inside.

    Shapes: x [..., H] of any strides (copied where rows have none in common), weight, bias [H] -> [..., H].
    Args:
        main_grad, bias_main_grad: [H] buffers to which the gradient of the weight, of the bias is added; that
            parameter then gets no gradient of its own.
        out_dtype: dtype of y, x's unless given (a residual stream in fp32 feeding bf16 GEMMs).
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    _check(x, weight, bias)
    if use_triton("layer_norm", impl, supports(x, weight, bias)):
        form = eps, zero_centered, out_dtype or x.dtype
        grads = buffer_of(weight, main_grad), buffer_of(bias, bias_main_grad)
        y: Tensor = apply(LayerNormFn, x, weight, bias, *grads, form)
        return y
    weight = accumulate_into(weight, main_grad)
    bias = None if bias is None else accumulate_into(bias, bias_main_grad)
    return layer_norm_reference(x, weight, bias, eps, zero_centered, out_dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """(layer_norm(h), h) with h = x + residual, in one pass; h has the residual's dtype, y has x's.

    Shapes: x, residual [..., H], weight, bias [H] -> two of [..., H]. Otherwise as `layer_norm`.
    """
    _check(x, weight, bias)
    if x.shape != residual.shape:
        raise ShapeError(
            f"add_layer_norm: x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape."
        )
    if use_triton("add_layer_norm", impl, supports(x, weight, bias, residual)):
        form = eps, zero_centered, out_dtype or x.dtype
        grads = buffer_of(weight, main_grad), buffer_of(bias, bias_main_grad)
        y, total = apply(AddLayerNormFn, x, residual, weight, bias, *grads, form)
        return y, total
    weight = accumulate_into(weight, main_grad)
    bias = None if bias is None else accumulate_into(bias, bias_main_grad)
    return add_layer_norm_reference(x, residual, weight, bias, eps, zero_centered, out_dtype)
