"""Rotary position embedding in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype


def rotary_reference(
    x_SBND: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_SB: Tensor | None = None,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Turn channel pairs of each head by the angle of the token's position; other channels pass through.

    A pair is (i, i + R) of the first 2R channels, or (2i, 2i + 1) when interleaved; it becomes
    (a cos - b sin, b cos + a sin), with sin negated for `inverse`. fp32 inside, rounded once.

    Shapes: x [S, B, N, D], cos and sin [P, R] with 2R <= D, positions [S, B] integers below P (None: the
    index in the sequence) -> [S, B, N, D] contiguous.
    Source: Su et al. 2021, arXiv 2104.09864.
    """
    S, half = x_SBND.shape[0], cos_PR.shape[1]
    cos, sin = (
        table[:S, None, None] if positions_SB is None else table[positions_SB.long()][:, :, None]
        for table in (cos_PR, sin_PR)
    )
    if inverse:
        sin = -sin
    turned, passed = x_SBND[..., : 2 * half].to(compute_dtype(x_SBND)), x_SBND[..., 2 * half :]
    pairs, dim = ((-1, 2), 4) if interleaved else ((2, -1), 3)
    a, b = turned.unflatten(3, pairs).unbind(dim)  # [S, B, N, R] each
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim).flatten(3).to(x_SBND.dtype)
    return torch.cat((turned, passed), dim=3)
