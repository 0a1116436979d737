"""RMSNorm is the norm kernel without a mean."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.norm_triton import norm_backward, norm_forward


def forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(y, rstd) of x [..., H]; rstd is fp32, one a row."""
    y, _, _, rstd = norm_forward(x, None, weight, None, eps, zero_centered, out_dtype, False)
    return y, rstd


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, rstd) of x + residual, both [..., H]."""
    y, total, _, rstd = norm_forward(x, residual, weight, None, eps, zero_centered, out_dtype, False)
    assert total is not None
    return y, total, rstd


def backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor,
    main_grad: Tensor | None, zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx, dweight). With a main_grad the weight's gradient is added there and dweight is empty.

    dx has x's dtype, and is the gradient of the sum (so of x and of the residual) where `dsum` is given.
    """
    dweight = torch.empty_like(weight) if main_grad is None else weight.new_empty(0)
    target = dweight if main_grad is None else main_grad
    given = (main_grad is not None, False)
    return norm_backward(dy, dsum, x, weight, None, rstd, target, None, given, zero_centered), dweight
