"""Bias + GEGLU in plain PyTorch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype

GeluForm = Literal["tanh", "exact", "quick"]
FORMS = ("tanh", "exact", "quick")


def gelu(x: Tensor, approximate: GeluForm) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415): exact, by tanh, or x sigmoid(1.702 x)."""
    if approximate == "quick":
        return x * torch.sigmoid(1.702 * x)
    return torch.nn.functional.gelu(x, approximate="none" if approximate == "exact" else "tanh")


def bias_geglu_reference(
    x: Tensor,
    bias: Tensor | None = None,
    approximate: GeluForm = "tanh",
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """y = gelu(gate) * (up + offset), [gate | up] = x + bias.

    With `clamp`, gate is first limited from above and up on both sides; outside, the gradient is 0.
    Shapes: x [..., 2F], bias [2F] -> y [..., F] in x's dtype. fp32 inside, rounded once.
    Source: Shazeer 2020, arXiv 2002.05202.
    """
    wide = x.to(compute_dtype(x))
    if bias is not None:
        wide = wide + bias
    gate, up = wide.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (gelu(gate, approximate) * (up + offset)).to(x.dtype)
