"""Bias + squared ReLU in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.activation_reference import Form, bias_activation_reference


def bias_squared_relu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = max(x + bias, 0)^2: x [..., F], bias [F] -> y [..., F] in x's dtype. fp32 inside, rounded once.

    Source: So et al. 2021, arXiv 2109.08668.
    """
    return bias_activation_reference(x, bias, Form("relu2"))
