"""What the tests of the activations are given."""

from __future__ import annotations

import torch
from torch import Tensor


def activation_inputs(
    device: str,
    dtype: torch.dtype,
    rows: int,
    cols: int,
    *,
    halves: int,
    has_bias: bool = True,
    seed: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x [rows, halves * cols], bias [halves * cols] and dy [rows, cols]; a gated unit takes two halves."""
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(rows, halves * cols, generator=generator)).to(device, dtype)
    bias = torch.randn(halves * cols, generator=generator).to(device, dtype) if has_bias else None
    return x, bias, torch.randn(rows, cols, generator=generator).to(device, dtype)
