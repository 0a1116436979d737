"""Bias + squared ReLU in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype


def bias_squared_relu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = max(x + bias, 0)^2: x [..., F], bias [F] -> y [..., F] in x's dtype. fp32 inside, rounded once.

    Source: So et al. 2021, arXiv 2109.08668.
    """
    wide = x.to(compute_dtype(x))
    if bias is not None:
        wide = wide + bias
    return torch.relu(wide).square().to(x.dtype)
