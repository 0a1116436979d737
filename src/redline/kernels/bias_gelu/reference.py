"""Bias + GELU in plain PyTorch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from redline.kernels.activation_reference import Form, bias_activation_reference

GeluForm = Literal["tanh", "exact"]
FORMS = ("tanh", "exact")


def bias_gelu_reference(x: Tensor, bias: Tensor | None = None, approximate: GeluForm = "tanh") -> Tensor:
    """y = gelu(x + bias): "tanh" as Megatron's fused path, "exact" (erf) as its unfused one.

    Shapes: x [..., F], bias [F] -> y [..., F] in x's dtype. fp32 inside, rounded once.
    Source: Hendrycks and Gimpel 2016, arXiv 1606.08415.
    """
    return bias_activation_reference(x, bias, Form(approximate))
