"""Bias + SwiGLU in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.activation_reference import Form, bias_activation_reference


def bias_swiglu_reference(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """y = silu(gate) * (up + offset), [gate | up] = x + bias.

    With `clamp`, gate is first limited from above and up on both sides; outside, the gradient is 0.
    Shapes: x [..., 2F], bias [2F] -> y [..., F] in x's dtype. fp32 inside, rounded once.
    Source: Shazeer 2020, arXiv 2002.05202.
    """
    return bias_activation_reference(x, bias, Form("silu", True, clamp, offset))
