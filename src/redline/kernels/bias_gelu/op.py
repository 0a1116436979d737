"""Bias + GELU as an operator."""

from __future__ import annotations

from torch import Tensor

from redline.errors import ShapeError
from redline.kernels.activation_op import bias_activation, supports
from redline.kernels.activation_reference import Form
from redline.kernels.bias_gelu.reference import FORMS, GeluForm
from redline.kernels.common import Impl

__all__ = ["bias_gelu", "supports"]


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
    if approximate not in FORMS:
        raise ShapeError(f"bias_gelu: approximate={approximate!r} is not one of {FORMS}.")
    return bias_activation("bias_gelu", Form(approximate), x, bias, main_grad, impl)
