"""PyTorch's scaled_dot_product_attention held to one kernel: it runs, or an error says why it cannot."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.attention.spec import Attention, AttentionDropout, MaskSpec, Request, check_shapes


def sdpa(
    kernel: SDPBackend,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
    softcap: float = 0.0,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Run `kernel` on views in its own order [B, N, S, D] and return [S, B, N, D]; plain or causal only."""
    plain = mask.segment_ids_BS is None and mask.cu_seqlens is None and mask.window is None
    assert plain and dropout is None and not softcap and sink_N is None, "select_backend refuses these"
    check_shapes(q_SBND, k_SBGD, v_SBGD, mask)
    with sdpa_kernel(kernel):
        out_BNSD = F.scaled_dot_product_attention(
            q_SBND.permute(1, 2, 0, 3),
            k_SBGD.permute(1, 2, 0, 3),
            v_SBGD.permute(1, 2, 0, 3),
            is_causal=mask.causal,
            scale=softmax_scale,
            enable_gqa=q_SBND.shape[2] != k_SBGD.shape[2],
        )
    return out_BNSD.permute(2, 0, 1, 3)


def is_sdpa(attention: Attention) -> bool:
    """Whether a backend is one of PyTorch's own kernels."""
    return isinstance(attention, functools.partial) and attention.func is sdpa


def common_reason(request: Request) -> str | None:
    """Why no SDPA kernel can take `request`, or None."""
    if request.dropout:
        return "it draws dropout from a generator and cannot take the run's dropout keys"
    if request.segments:
        return "it knows no document boundaries inside a sample"
    if request.packed:
        return "PyTorch hands it no packed documents"
    if request.window is not None:
        return "PyTorch hands it no sliding window"
    if request.softcap:
        return "PyTorch hands it no soft-capping of scores"
    if request.sinks:
        return "PyTorch hands it no attention sinks"
    return None
