"""LayerNorm in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype


def layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * w + bias, where w is `weight`, or 1 + `weight` when zero-centred.

    var is the biased variance. Shapes: x [..., H], weight and bias [H] -> y [..., H] in `out_dtype` (default:
    x's). fp32 inside, rounded once. Source: Ba, Kiros and Hinton 2016, arXiv 1607.06450.
    """
    wide = x.to(compute_dtype(x))
    gain = weight.to(wide.dtype) + 1.0 if zero_centered else weight.to(wide.dtype)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * gain
    return (y if bias is None else y + bias).to(out_dtype or x.dtype)


def add_layer_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(h), h) with h = x + residual in the residual's dtype; y's default dtype is x's."""
    total = (x.to(compute_dtype(x)) + residual).to(residual.dtype)
    return layer_norm_reference(total, weight, bias, eps, zero_centered, out_dtype or x.dtype), total
