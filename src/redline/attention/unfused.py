"""Attention in plain steps, with the S x S probabilities in memory: what every other backend must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from redline.attention.spec import AttentionDropout, MaskSpec, Request, check_shapes
from redline.kernels.masked_softmax import masked_softmax

Softmax = Callable[..., Tensor]


def supports(request: Request) -> str | None:
    """Always None: this backend takes every request."""
    return None


def plain_softmax(
    scores_BNST: Tensor, scale: float, mask: MaskSpec, softcap: float = 0.0, sink_N: Tensor | None = None
) -> Tensor:
    """Softmax of the scaled (and capped) scores over the visible keys, in fp32 (fp64 for fp64), rounded once.

    A query that sees no key gets zeros. Shapes: [B, N, S, T] -> the same, in the dtype of the scores.
    """
    dtype, S = scores_BNST.dtype, scores_BNST.shape[2]
    scores_BNST = scores_BNST.to(torch.promote_types(dtype, torch.float32)) * scale
    if softcap:
        scores_BNST = torch.tanh(scores_BNST / softcap) * softcap
    hidden = _hidden_keys(mask, S, scores_BNST.device)  # [1 or B, 1, S, S]
    if hidden is not None:
        # Filled with the lowest finite number, a row that sees no key has a finite softmax still; with -inf
        # it would be NaN, and its gradient too. Only segments and documents make such rows.
        scores_BNST = scores_BNST.masked_fill(hidden, torch.finfo(scores_BNST.dtype).min)
    if sink_N is None:
        probs_BNST = scores_BNST.softmax(-1)
    else:
        sink_BNS1 = sink_N.to(scores_BNST.dtype)[None, :, None, None].expand(*scores_BNST.shape[:3], 1)
        probs_BNST = torch.cat((scores_BNST, sink_BNS1), dim=-1).softmax(-1)[..., :-1]
    if hidden is not None and (mask.segment_ids_BS is not None or mask.cu_seqlens is not None):
        probs_BNST = probs_BNST.masked_fill(hidden, 0.0)
    return probs_BNST.to(dtype)


def fused_softmax(
    scores_BNST: Tensor, scale: float, mask: MaskSpec, softcap: float = 0.0, sink_N: Tensor | None = None
) -> Tensor:
    """`plain_softmax` by one kernel, which keeps only its result and reads no causal mask.

    It knows neither caps nor sinks: build gives `plain_softmax` to a model that has them.
    """
    assert not softcap and sink_N is None
    other_B1SS = _hidden_beside_causal(mask, scores_BNST.shape[2], scores_BNST.device)
    return masked_softmax(scores_BNST, scale, causal=mask.causal, mask=other_B1SS, impl="triton")


def unfused_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
    softcap: float = 0.0,
    sink_N: Tensor | None = None,
    softmax: Softmax = plain_softmax,
) -> Tensor:
    """softmax(scale * q k^T over the visible keys) v. A query that sees no key gets zeros.

    Shapes: [S, B, N, D], [S, B, G, D], [S, B, G, D] -> [S, B, N, D]; any float dtype, any strides. Groups are
    a dimension of the products: keys are not repeated. Memory: B * N * S * S probabilities.

    Args:
        softmax: `plain_softmax` or `fused_softmax` (`--masked-softmax-fusion`).
    """
    check_shapes(q_SBND, k_SBGD, v_SBGD, mask, sink_N)
    q_SBGRD = q_SBND.unflatten(2, (k_SBGD.shape[2], -1))  # R = N/G query heads read one group
    groups = q_SBGRD.shape[2:4]
    # The product is handed over, not held: it is gone once the softmax has read it.
    probs_BNST = softmax(
        torch.einsum("sbgrd,tbgd->bgrst", q_SBGRD, k_SBGD).flatten(1, 2),
        softmax_scale,
        mask,
        softcap,
        sink_N,
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
    hidden = _hidden_beside_causal(mask, S, device)
    if mask.causal:
        future = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)[None, None]
        hidden = future if hidden is None else hidden | future
    return hidden


def _hidden_beside_causal(mask: MaskSpec, S: int, device: torch.device) -> Tensor | None:
    """[1 or B, 1, S, S]: True where the key is of another document or outside the window."""
    hidden = None
    if (segments_BS := _segments(mask, S, device)) is not None:
        query_BS1, key_B1S = segments_BS[:, :, None], segments_BS[:, None, :]
        hidden = ((query_BS1 != key_B1S) | (query_BS1 < 0))[:, None]
    left, right = mask.limits
    if left >= 0:
        before = torch.ones(S, S, dtype=torch.bool, device=device).tril(-left - 1)[None, None]
        hidden = before if hidden is None else hidden | before
    if right >= 0 and not mask.causal:
        after = torch.ones(S, S, dtype=torch.bool, device=device).triu(right + 1)[None, None]
        hidden = after if hidden is None else hidden | after
    return hidden


def _segments(mask: MaskSpec, S: int, device: torch.device) -> Tensor | None:
    """The number of each token's document [B, S], negative for none; None: all are of one."""
    if mask.cu_seqlens is None:
        return mask.segment_ids_BS
    position_S = torch.arange(S, device=device, dtype=mask.cu_seqlens.dtype)
    ends = mask.cu_seqlens[1:]
    document_S = torch.searchsorted(ends, position_S, right=True)
    return torch.where(document_S < len(ends), document_S, -1)[None]
