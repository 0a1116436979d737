"""Bias + squared ReLU as an operator."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.activation_op import bias_activation, supports
from redline.kernels.activation_reference import Form
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
    return bias_activation("bias_squared_relu", Form("relu2"), x, bias, main_grad, impl)
