"""What every attention backend takes and what it may be asked for.

A backend is a function

    attention(q_SBND, k_SBGD, v_SBGD, mask, softmax_scale=..., dropout=...) -> out_SBND

over strided views of the merged projection [S, B, (N + 2G) D]; it makes no copy of them. Query head n reads
the keys and values of group n // (N/G). Softmax and its sums are at least fp32; the output has the input's
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from redline.errors import ShapeError


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """Which keys a query sees.

    Attributes:
        causal: only keys at its own position and before.
        segment_ids_BS: int [B, S]; only keys of its own segment (documents packed into one sample). A
            negative id is padding: it sees nothing, and its output is zero. None: the whole sample is one
            segment.
    """

    causal: bool = True
    segment_ids_BS: Tensor | None = None


class AttentionDropout(Protocol):
    """Dropout of attention probabilities whose mask is a function of keys and counters (layout: rng.py)."""

    @property
    def probability(self) -> float:
        """The share of probabilities set to zero."""

    def drop_attention(self, probs_BNST: Tensor) -> Tensor:
        """[B, N, S, S] -> the same with dropped entries 0 and the rest divided by 1 - probability."""


class Attention(Protocol):
    """A backend (see the module's text)."""

    def __call__(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        mask: MaskSpec,
        *,
        softmax_scale: float,
        dropout: AttentionDropout | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run will ask of its backend, known before the first step."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_groups: int
    seq_length: int = 128
    dropout: bool = False
    segments: bool = False
    deterministic: bool = False


def check_shapes(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> None:
    """Raises ShapeError unless q, k and v belong to one self-attention."""
    S, B, N, D = q_SBND.shape
    G = k_SBGD.shape[2]
    if k_SBGD.shape != (S, B, G, D) or v_SBGD.shape != k_SBGD.shape or N % G:
        raise ShapeError(
            f"attention was given q {tuple(q_SBND.shape)}, k {tuple(k_SBGD.shape)}, v {tuple(v_SBGD.shape)}.",
            why="it needs q [S, B, N, D], k and v [S, B, G, D], with N a multiple of G.",
        )
