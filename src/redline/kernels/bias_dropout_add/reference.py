"""Bias + dropout + residual in plain PyTorch, with the counter-based mask of rng.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype
from redline.rng import HIDDEN_LANES, MASK32, PHILOX_M0, PHILOX_M1, PHILOX_ROUNDS, PHILOX_W0, PHILOX_W1


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """What a mask is a pure function of, as tensors on the device; see rng.py for the layout of a draw.

    Attributes:
        key: int64 [2], the two 32-bit key words of the site.
        iteration: int64 [].
        sample_index_B: int64 [B], the number of each sample in the run's data order.
        positions_S: int64 [S], the place in the whole sample of each row held here; None: 0 to S - 1.
    """

    key: Tensor
    iteration: Tensor
    sample_index_B: Tensor
    positions_S: Tensor | None = None


def keep_mask(draw: DropoutKey, probability: float, S: int, H: int) -> Tensor:
    """Which elements survive: bool [S, B, H]. A Philox 4x32-10 block serves 8 elements."""
    device = draw.key.device
    position_S = torch.arange(S, device=device) if draw.positions_S is None else draw.positions_S
    element_S1H = position_S[:, None, None] * H + torch.arange(H, device=device)
    block_S1H = element_S1H >> 3
    k0, k1 = draw.key[0], draw.key[1]
    c0, c1, c2, c3 = torch.broadcast_tensors(
        block_S1H & MASK32, block_S1H >> 32, draw.sample_index_B[:, None] & MASK32, draw.iteration & MASK32
    )
    for _ in range(PHILOX_ROUNDS):  # int64 products wrap, but their 64 bits are right
        product0, product1 = PHILOX_M0 * c0, PHILOX_M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32 & MASK32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32 & MASK32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0, k1 = k0 + PHILOX_W0 & MASK32, k1 + PHILOX_W1 & MASK32
    words = torch.stack((c0, c1, c2, c3), dim=-1)
    word = words.gather(-1, (element_S1H >> 1 & 3).expand(c0.shape).unsqueeze(-1)).squeeze(-1)
    lane = word >> (element_S1H & 1) * 16 & 0xFFFF
    return lane >= HIDDEN_LANES.threshold(probability)


def bias_dropout_add_reference(
    x_SBH: Tensor, bias_H: Tensor | None, residual_SBH: Tensor, probability: float, draw: DropoutKey | None
) -> Tensor:
    """residual + dropout(x + bias), in the residual's dtype; fp32 inside, rounded once.

    Survivors are multiplied by 1 / (1 - probability), as it is applied: in steps of 2^-16 (rng.py).
    Shapes: x, residual [S, B, H], bias [H] -> [S, B, H].
    Source: Srivastava et al. 2014, "Dropout"; the mask's generator: rng.py.
    """
    wide = x_SBH.to(compute_dtype(residual_SBH))
    if bias_H is not None:
        wide = wide + bias_H
    if draw is not None and probability > 0.0:
        keep_SBH = keep_mask(draw, probability, x_SBH.shape[0], x_SBH.shape[2])
        wide = torch.where(keep_SBH, wide * HIDDEN_LANES.scale(probability), 0.0)
    return (wide + residual_SBH).to(residual_SBH.dtype)
