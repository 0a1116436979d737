"""Bias + SwiGLU as an operator."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.activation_op import bias_activation, supports
from redline.kernels.activation_reference import Form
from redline.kernels.common import Impl

__all__ = ["bias_swiglu", "supports"]


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
        offset: added to up.
        main_grad: [2F] buffer to which the bias's gradient is added; the bias then gets none of its own.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    return bias_activation("bias_swiglu", Form("silu", True, clamp, offset), x, bias, main_grad, impl)
