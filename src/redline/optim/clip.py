"""Norms and counts over flat buffers, and the clipping coefficient.

Nothing here waits for the device: results are 0-dim tensors.

The norm is taken in two stages: fixed rows of 4096 elements in fp32, then the rows' norms in float64. One
long fp32 sum over a model is far off (6e-4 at 16 million elements on a CPU, against 3e-9 by rows, or 2e-6
when all elements are alike), and a row, being summed by one thread or block, makes the result the same for
any thread count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ROW = 1 << 12  # below the length at which PyTorch's CPU reductions split one row over threads


def l2_norm(flats: Iterable[Tensor], device: torch.device) -> Tensor:
    """The Euclidean norm of all elements together, a float64 scalar on `device`; NaN and Inf come through.

    Each flat tensor is read once. Sums are in fp32, in float64 for float64 input.
    """
    total: Tensor = torch.linalg.vector_norm(_row_norms(flats, device, 2))
    return total


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """The factor on gradients of this norm: min(1, clip / (norm + 1e-6)), or 1 where clip is 0."""
    if clip_grad == 0:
        return torch.ones_like(norm)
    return (clip_grad / (norm + 1e-6)).clamp(max=1.0)


def count_nonzero(flats: Sequence[Tensor], device: torch.device) -> Tensor:
    """How many elements are not zero, NaN included, a float64 scalar on `device`; padding never counts."""
    return _row_norms(
        flats, device, 0
    ).sum()  # torch.count_nonzero makes copies of 8 bytes an element on a GPU


def _row_norms(flats: Iterable[Tensor], device: torch.device, order: int) -> Tensor:
    """[rows] float64: the norm of each row and of each shorter rest; order 0 counts what is not zero."""
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for flat in flats:
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        whole = flat.numel() // ROW * ROW
        for rows in (flat[:whole].view(whole // ROW, ROW), flat[whole:].view(1, -1)):
            norms.append(torch.linalg.vector_norm(rows, order, dim=1, dtype=dtype).double())
    return torch.cat(norms)
