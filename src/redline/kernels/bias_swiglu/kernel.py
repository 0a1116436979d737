"""Bias + SwiGLU is the gated kernel with silu."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.gated_triton import gated_backward, gated_forward


def forward(x: Tensor, bias: Tensor | None, clamp: float | None, offset: float) -> Tensor:
    """x [..., 2F], bias [2F] or None -> y [..., F]."""
    return gated_forward(x, bias, "silu", clamp, offset)


def backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, clamp: float | None, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx [..., 2F], dbias [2F]); dbias is empty without a bias, and where it was added to main_grad."""
    return gated_backward(dy, x, bias, main_grad, "silu", clamp, offset)
