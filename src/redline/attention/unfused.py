"""Attention in plain steps, with the S x S probabilities in memory: what every other backend must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.attention.spec import AttentionDropout, MaskSpec, Request, check_shapes


def supports(request: Request) -> str | None:
    """Always None: this backend takes every request."""
    return None


def unfused_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """softmax(scale * q k^T over the visible keys) v. A query that sees no key gets zeros.

    Shapes: [S, B, N, D], [S, B, G, D], [S, B, G, D] -> [S, B, N, D]; any float dtype, any strides. The
    softmax runs in fp32 (fp64 for fp64) and is rounded once. Groups are a dimension of the products: keys
    are not repeated. Memory: B * N * S * S probabilities.
    """
    check_shapes(q_SBND, k_SBGD, v_SBGD)
    q_SBGRD = q_SBND.unflatten(2, (k_SBGD.shape[2], -1))  # R = N/G query heads read one group
    scores_BGRST = torch.einsum("sbgrd,tbgd->bgrst", q_SBGRD, k_SBGD)
    scores_BGRST = scores_BGRST.to(torch.promote_types(q_SBND.dtype, torch.float32)) * softmax_scale
    hidden = _hidden_keys(mask, q_SBND.shape[0], q_SBND.device)  # [1 or B, 1, 1, S, S]
    if hidden is not None:
        # Filled with the lowest finite number, a row that sees no key has a finite softmax still; with -inf
        # it would be NaN, and its gradient too. Only segments make such rows.
        scores_BGRST = scores_BGRST.masked_fill(hidden, torch.finfo(scores_BGRST.dtype).min)
    probs_BGRST = scores_BGRST.softmax(-1)
    if hidden is not None and mask.segment_ids_BS is not None:
        probs_BGRST = probs_BGRST.masked_fill(hidden, 0.0)
    probs_BGRST = probs_BGRST.to(q_SBND.dtype)
    if dropout is not None:
        probs_BGRST = dropout.drop_attention(probs_BGRST.flatten(1, 2)).view_as(probs_BGRST)
    out_BGRSD = torch.einsum(
        "bgrst,tbgd->bgrsd", probs_BGRST, v_SBGD
    )  # in the order of probs: no copy of them
    return out_BGRSD.permute(3, 0, 1, 2, 4).flatten(2, 3)


def _hidden_keys(mask: MaskSpec, S: int, device: torch.device) -> Tensor | None:
    """True where the query (second to last dim) must not see the key (last dim); None: it sees all."""
    hidden = None
    if mask.causal:
        hidden = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)[None]
    if mask.segment_ids_BS is not None:
        query_BS1, key_B1S = mask.segment_ids_BS[:, :, None], mask.segment_ids_BS[:, None, :]
        other_BSS = (query_BS1 != key_B1S) | (query_BS1 < 0)
        hidden = other_BSS if hidden is None else hidden | other_BSS
    return None if hidden is None else hidden[:, None, None]
