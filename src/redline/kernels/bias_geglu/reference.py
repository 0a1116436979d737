"""Bias + GEGLU in plain PyTorch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from redline.kernels.activation_reference import Form, bias_activation_reference

GeluForm = Literal["tanh", "exact", "quick"]
FORMS = ("tanh", "exact", "quick")


def bias_geglu_reference(
    x: Tensor,
    bias: Tensor | None = None,
    approximate: GeluForm = "tanh",
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """y = gelu(gate) * (up + offset), [gate | up] = x + bias.

    With `clamp`, gate is first limited from above and up on both sides; outside, the gradient is 0. Quick,
    limited by 7 and with an offset of 1, it is what gpt-oss calls its SwiGLU.
    Shapes: x [..., 2F], bias [2F] -> y [..., F] in x's dtype. fp32 inside, rounded once.
    Source: Shazeer 2020, arXiv 2002.05202.
    """
    return bias_activation_reference(x, bias, Form(approximate, True, clamp, offset))
