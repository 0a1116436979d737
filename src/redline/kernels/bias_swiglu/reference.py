"""Bias + SwiGLU in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype


def bias_swiglu_reference(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """y = silu(gate) * (up + offset), [gate | up] = x + bias.

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
    return (torch.nn.functional.silu(gate) * (up + offset)).to(x.dtype)
