"""What a gradient pass must find out, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grad_statistics_reference(grads: Sequence[Tensor]) -> Tensor:
    """[sum of squares, non-finite elements, non-zero elements] of all tensors together, float64."""
    total = torch.zeros(3, dtype=torch.float64, device=grads[0].device)
    for grad in grads:
        squares = grad.double().square().sum()
        finite, nonzero = torch.isfinite(grad).sum(), torch.count_nonzero(grad)
        total += torch.stack((squares, (grad.numel() - finite).double(), nonzero.double()))
    return total
