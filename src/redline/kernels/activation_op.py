"""The operator and the autograd that the activation rooms share: bias + activation, gated or not.

A room adds its words (its arguments, its shapes, its formula); what differs below them is a `Form`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
from redline.kernels.activation_reference import Form, bias_activation_reference
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


def supports(x: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    return why_not(x, bias)


def _forward_fake(
    x: Tensor, bias: Tensor | None, kind: str, gated: bool, clamp: float | None, offset: float
) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2) if gated else x.shape)


def _backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, kind: str, gated: bool,
    clamp: float | None, offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    like = x if bias is None else bias
    return x.new_empty(x.shape), like.new_empty(0 if bias is None or main_grad is not None else x.shape[-1])


_KERNEL = "redline.kernels.activation_triton"
FORM = "str kind, bool gated, float? clamp, float offset"
_forward = operator(
    f"bias_activation_fwd(Tensor x, Tensor? bias, {FORM}) -> Tensor",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_backward = operator(
    f"bias_activation_bwd(Tensor dy, Tensor x, Tensor? bias, Tensor(a!)? main_grad, {FORM})"
    " -> (Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


class BiasActivationFn(torch.autograd.Function):
    """Saves the input and the bias; main_grad (of the bias) rides on ctx as an attribute."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, kind: str, gated: bool,
        clamp: float | None, offset: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, bias)
        ctx.main_grad, ctx.form = main_grad, (kind, gated, clamp, offset)
        y: Tensor = _forward(x, bias, kind, gated, clamp, offset)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = _backward(dy, x, bias, ctx.main_grad, *ctx.form)
        return dx, None if bias is None or ctx.main_grad is not None else dbias, *(None,) * 5


class GatedActivationFn(BiasActivationFn):
    """The same under a name of its own: a profile counts what it moves by that."""


def bias_activation(
    op: str, form: Form, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, impl: Impl
) -> Tensor:
    """Check, choose and run, for the room `op`.

    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    shape = x.shape
    if not (shape and shape[-1] > 0):
        raise ShapeError(f"{op}: x {tuple(x.shape)} has no last dim to work on.")
    if form.gated and shape[-1] % 2:
        raise ShapeError(
            f"{op}: the last dim of x {tuple(x.shape)} is not even.", "it holds gate and up side by side."
        )
    if not (bias is None or (bias.shape == (shape[-1],) and bias.is_contiguous())):
        raise ShapeError(
            f"{op}: the bias does not fit x {tuple(x.shape)}.",
            "the bias is one contiguous vector as long as x's last dim.",
        )
    if use_triton(op, impl, supports(x, bias)):
        function = GatedActivationFn if form.gated else BiasActivationFn
        y: Tensor = apply(function, x, bias, buffer_of(bias, main_grad), *form)
        return y
    return bias_activation_reference(x, None if bias is None else accumulate_into(bias, main_grad), form)
