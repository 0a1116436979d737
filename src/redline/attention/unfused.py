"""Attention in plain steps, with the S x S probabilities in memory: what every other backend must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from redline.attention.spec import AttentionDropout, MaskSpec, Request, check_shapes
from redline.kernels.masked_softmax import masked_softmax

Softmax = Callable[[Tensor, float, MaskSpec], Tensor]


def supports(request: Request) -> str | None:
    """Always None: this backend takes every request."""
    return None


def plain_softmax(scores_BNST: Tensor, scale: float, mask: MaskSpec) -> Tensor:
    """Softmax of scale * scores over the keys that `mask` shows, in fp32 (fp64 for fp64), rounded once.

    A query that sees no key gets zeros. Shapes: [B, N, S, T] -> the same, in the dtype of the scores.
    """
    dtype, S = scores_BNST.dtype, scores_BNST.shape[2]
    scores_BNST = scores_BNST.to(torch.promote_types(dtype, torch.float32)) * scale
    hidden = _hidden_keys(mask, S, scores_BNST.device)  # [1 or B, 1, S, S]
    if hidden is not None:
        # Filled with the lowest finite number, a row that sees no key has a finite softmax still; with -inf
        # it would be NaN, and its gradient too. Only segments make such rows.
        scores_BNST = scores_BNST.masked_fill(hidden, torch.finfo(scores_BNST.dtype).min)
    probs_BNST = scores_BNST.softmax(-1)
    if hidden is not None and mask.segment_ids_BS is not None:
        probs_BNST = probs_BNST.masked_fill(hidden, 0.0)
    return probs_BNST.to(dtype)


def fused_softmax(scores_BNST: Tensor, scale: float, mask: MaskSpec) -> Tensor:
    """`plain_softmax` by one kernel, which keeps only its result and reads no causal mask."""
    other_B1SS = _other_segments(mask)
    return masked_softmax(scores_BNST, scale, causal=mask.causal, mask=other_B1SS, impl="triton")


def unfused_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
    softmax: Softmax = plain_softmax,
) -> Tensor:
    """softmax(scale * q k^T over the visible keys) v. A query that sees no key gets zeros.

    Shapes: [S, B, N, D], [S, B, G, D], [S, B, G, D] -> [S, B, N, D]; any float dtype, any strides. Groups are
    a dimension of the products: keys are not repeated. Memory: B * N * S * S probabilities.

    Args:
        softmax: `plain_softmax` or `fused_softmax` (`--masked-softmax-fusion`).
    """
    check_shapes(q_SBND, k_SBGD, v_SBGD)
    q_SBGRD = q_SBND.unflatten(2, (k_SBGD.shape[2], -1))  # R = N/G query heads read one group
    groups = q_SBGRD.shape[2:4]
    # The product is handed over, not held: it is gone once the softmax has read it.
    probs_BNST = softmax(
        torch.einsum("sbgrd,tbgd->bgrst", q_SBGRD, k_SBGD).flatten(1, 2), softmax_scale, mask
    )
    if dropout is not None:
        probs_BNST = dropout.drop_attention(probs_BNST)
    probs_BGRST = probs_BNST.unflatten(1, groups)
    out_BGRSD = torch.einsum(
        "bgrst,tbgd->bgrsd", probs_BGRST, v_SBGD
    )  # in the order of probs: no copy of them
    return out_BGRSD.permute(3, 0, 1, 2, 4).flatten(2, 3)


def _hidden_keys(mask: MaskSpec, S: int, device: torch.device) -> Tensor | None:
    """True where the query (second to last dim) must not see the key (last dim); None: it sees all."""
    hidden = _other_segments(mask)
    if mask.causal:
        future = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)[None, None]
        hidden = future if hidden is None else hidden | future
    return hidden


def _other_segments(mask: MaskSpec) -> Tensor | None:
    """[B, 1, S, S]: True where query and key are of different documents, or the query of none."""
    if mask.segment_ids_BS is None:
        return None
    query_BS1, key_B1S = mask.segment_ids_BS[:, :, None], mask.segment_ids_BS[:, None, :]
    other_BSS = (query_BS1 != key_B1S) | (query_BS1 < 0)
    return other_BSS[:, None]
