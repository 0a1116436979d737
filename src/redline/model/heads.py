"""How a merged projection divides into heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """N query heads over G groups of keys and values, D channels each; side by side, [q | k | v]."""

    num_heads: int
    num_groups: int
    head_dim: int

    def split(self, qkv_SBX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [S, B, N, D], [S, B, G, D], [S, B, G, D] of [S, B, (N + 2G) D]."""
        heads = qkv_SBX.unflatten(2, (-1, self.head_dim))
        q_SBND, k_SBGD, v_SBGD = heads.split((self.num_heads, self.num_groups, self.num_groups), dim=2)
        return q_SBND, k_SBGD, v_SBGD
