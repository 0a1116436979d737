"""FlashAttention as PyTorch carries it: tiles of the score matrix stay on chip, memory grows with S, not S^2.

Source: Dao 2023, "FlashAttention-2", arXiv 2307.08691.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from redline.attention.sdpa import common_reason, probe, sdpa
from redline.attention.spec import AttentionDropout, MaskSpec, Request


def supports(request: Request) -> str | None:
    """Why this backend cannot take `request`, or None. On a GPU it computes in fp16 and bf16 only."""
    if reason := common_reason(request):
        return reason
    if request.device_type == "cuda" and request.dtype not in (torch.float16, torch.bfloat16):
        return f"on a GPU it computes in fp16 and bf16, not in {str(request.dtype).removeprefix('torch.')}"
    return probe(SDPBackend.FLASH_ATTENTION, request)


def flash_attention(
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
    """PyTorch's flash kernel, for a GPU or a CPU. Shapes as in spec.py; no segments, no dropout."""
    assert dropout is None and not softcap and sink_N is None, "select_backend refuses these"
    return sdpa(SDPBackend.FLASH_ATTENTION, q_SBND, k_SBGD, v_SBGD, mask, softmax_scale)
