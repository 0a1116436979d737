"""Embedding lookup in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.common import compute_dtype


def lookup_reference(ids: Tensor, weight_VH: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    """Rows of the weight, [..., H]: 0 where another rank holds the row, NaN where the vocabulary does not."""
    ids = ids.long()
    local = ids - vocab_start
    here = (local >= 0) & (local < weight_VH.shape[0])
    known = (ids >= 0) & (ids < vocab_size)
    rows = F.embedding(torch.where(here & known, local, 0), weight_VH)
    rows = torch.where(here[..., None], rows, 0.0)
    return torch.where(known[..., None], rows, torch.nan)


def embedding_reference(
    tokens: Tensor,
    weight_VH: Tensor,
    positions: Tensor | None = None,
    position_weight_PH: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Word embedding, plus the position's where one is given.

    Shapes: tokens and positions of any one shape, weights [V, H] and [P, H] -> [*tokens.shape, H] in the
    weight's dtype, rounded once. `lookup_reference` says what ids outside give.
    """
    vocab_size = weight_VH.shape[0] if vocab_size is None else vocab_size
    words = lookup_reference(tokens, weight_VH, vocab_start, vocab_size)
    if positions is None or position_weight_PH is None:
        return words
    places = lookup_reference(positions, position_weight_PH, 0, position_weight_PH.shape[0])
    wide = compute_dtype(words)
    return (words.to(wide) + places.to(wide)).to(words.dtype)
