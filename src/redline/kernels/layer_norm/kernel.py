"""LayerNorm is the norm kernel with a mean, and a bias where it has one."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.norm_triton import norm_backward, norm_forward


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of x [..., H]; the statistics are fp32, one a row."""
    y, _, mean, rstd = norm_forward(x, None, weight, bias, eps, zero_centered, out_dtype, True)
    assert mean is not None
    return y, mean, rstd


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, sum, mean, rstd) of x + residual, both [..., H]."""
    y, total, mean, rstd = norm_forward(x, residual, weight, bias, eps, zero_centered, out_dtype, True)
    assert total is not None and mean is not None
    return y, total, mean, rstd


def backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, main_grad: Tensor | None, bias_main_grad: Tensor | None, zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias). A gradient that was added to its main_grad is empty, as is that of no bias.

    dx has x's dtype, and is the gradient of the sum (so of x and of the residual) where `dsum` is given.
    """
    dweight = torch.empty_like(weight) if main_grad is None else weight.new_empty(0)
    dbias = weight.new_empty(0) if bias is None or bias_main_grad is not None else torch.empty_like(bias)
    targets = (
        dweight if main_grad is None else main_grad,
        None if bias is None else dbias if bias_main_grad is None else bias_main_grad,
    )
    given = (main_grad is not None, bias_main_grad is not None)
    return norm_backward(dy, dsum, x, weight, mean, rstd, *targets, given, zero_centered), dweight, dbias
