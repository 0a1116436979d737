"""RMSNorm in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y = x * rsqrt(mean(x^2) + eps) * w, where w is `weight`, or 1 + `weight` when zero-centred.

    Shapes: x [..., H], weight [H] -> y [..., H] in `out_dtype` (default: x's). fp32 inside, rounded once.
    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    wide = x.to(compute_dtype(x))
    gain = weight.to(wide.dtype) + 1.0 if zero_centered else weight.to(wide.dtype)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * gain).to(out_dtype or x.dtype)


def add_rms_norm_reference(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual in the residual's dtype; y's default dtype is x's.

    Without x, h is the residual.
    """
    if x is None:
        return rms_norm_reference(residual, weight, eps, zero_centered, out_dtype), residual
    total = (x.to(compute_dtype(x)) + residual).to(residual.dtype)
    return rms_norm_reference(total, weight, eps, zero_centered, out_dtype or x.dtype), total
