"""cuDNN's fused attention through PyTorch: the fastest kernel that PyTorch itself carries for Hopper."""

from __future__ import annotations

import functools

from torch.nn.attention import SDPBackend

from redline.attention.probe import probe
from redline.attention.sdpa import common_reason, sdpa
from redline.attention.spec import HALF_DTYPES, Request, name_of

fused_attention = functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)


def supports(request: Request) -> str | None:
    """Why this backend cannot take `request`, or None."""
    if request.device_type != "cuda":
        return "cuDNN needs an NVIDIA GPU"
    if reason := common_reason(request):
        return reason
    if request.deterministic:
        return "PyTorch does not vouch for cuDNN's backward being deterministic"
    if request.dtype not in HALF_DTYPES:
        return f"it computes in fp16 and bf16, not in {name_of(request.dtype)}"
    reason = probe(fused_attention, request)
    return reason and f"PyTorch refuses it: {reason}"
