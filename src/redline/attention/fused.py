"""cuDNN's fused attention through PyTorch: the fastest kernel that PyTorch itself carries for Hopper."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from redline.attention.sdpa import common_reason, probe, sdpa
from redline.attention.spec import AttentionDropout, MaskSpec, Request


def supports(request: Request) -> str | None:
    """Why this backend cannot take `request`, or None."""
    if request.device_type != "cuda":
        return "cuDNN needs an NVIDIA GPU"
    if reason := common_reason(request):
        return reason
    if request.deterministic:
        return "PyTorch does not vouch for cuDNN's backward being deterministic"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in fp16 and bf16, not in {str(request.dtype).removeprefix('torch.')}"
    return probe(SDPBackend.CUDNN_ATTENTION, request)


def fused_attention(
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
    """cuDNN's kernel. Shapes as in spec.py; no segments, no dropout."""
    assert dropout is None and not softcap and sink_N is None, "select_backend refuses these"
    return sdpa(SDPBackend.CUDNN_ATTENTION, q_SBND, k_SBGD, v_SBGD, mask, softmax_scale)
