"""Bias + GEGLU as an operator."""

from __future__ import annotations

from torch import Tensor

from redline.errors import ShapeError
from redline.kernels.activation_op import bias_activation, supports
from redline.kernels.activation_reference import Form
from redline.kernels.bias_geglu.reference import FORMS, GeluForm
from redline.kernels.common import Impl

__all__ = ["bias_geglu", "supports"]


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
        offset: added to up.
        main_grad: [2F] buffer to which the bias's gradient is added; the bias then gets none of its own.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    if approximate not in FORMS:
        raise ShapeError(f"bias_geglu: approximate={approximate!r} is not one of {FORMS}.")
    return bias_activation("bias_geglu", Form(approximate, True, clamp, offset), x, bias, main_grad, impl)
