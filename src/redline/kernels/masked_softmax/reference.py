"""Scale + mask + softmax in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype


def masked_positions(
    scores_BNSK: Tensor, causal: bool, mask: Tensor | None, lengths_B: Tensor | None
) -> Tensor | None:
    """True where a score takes no part, broadcastable to [B, N, S, K]; None when all take part."""
    S, K = scores_BNSK.shape[2:]
    device = scores_BNSK.device
    key_K = torch.arange(K, device=device)
    out = mask
    if causal:
        future_SK = key_K > torch.arange(S, device=device)[:, None] + (K - S)
        out = future_SK if out is None else out | future_SK
    if lengths_B is not None:
        padding_B11K = (key_K >= lengths_B[:, None])[:, None, None]
        out = padding_B11K if out is None else out | padding_B11K
    return out


def masked_softmax_reference(
    scores_BNSK: Tensor,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """softmax over K of scale * scores without the masked positions; a row with nothing left is 0.

    Shapes: scores [B, N, S, K], mask bool broadcastable to it (True = masked out), lengths [B] integers (keys
    from there on are padding) -> [B, N, S, K] in the dtype of scores. Causal: query i sees keys up to
    i + K - S. fp32 inside, rounded once.
    """
    scaled = scores_BNSK.to(compute_dtype(scores_BNSK)) * scale
    masked = masked_positions(scores_BNSK, causal, mask, lengths_B)
    if masked is None:
        return torch.softmax(scaled, dim=-1).to(scores_BNSK.dtype)
    # The lowest finite number, not -inf: a row that is masked whole would give NaN, and NaN gradients.
    scaled = scaled.masked_fill(masked, torch.finfo(scaled.dtype).min)
    return torch.softmax(scaled, dim=-1).masked_fill(masked, 0.0).to(scores_BNSK.dtype)
