"""Bias + squared ReLU as an operator."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.activation_op import Form, bias_activation, supports
from redline.kernels.bias_squared_relu.reference import bias_squared_relu_reference
from redline.kernels.common import Impl

__all__ = ["bias_squared_relu", "supports"]


def bias_squared_relu(
    x: Tensor, bias: Tensor | None = None, *, main_grad: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    """y = max(x + bias, 0)^2; fp32 inside, rounded once.

    Shapes: x [..., F] of any strides (copied where rows have none in common), bias [F] -> [..., F].
    Args:
        main_grad: [F] buffer to which the bias's gradient is added; the bias then gets none of its own.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    form, reference = Form("relu2"), bias_squared_relu_reference
    return bias_activation("bias_squared_relu", form, reference, x, bias, main_grad, impl)
