"""PyTorch's scaled_dot_product_attention held to one kernel: it runs, or an error says why it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.attention.spec import MaskSpec, Request, check_shapes

PROBE_LENGTH = 128


def sdpa(
    kernel: SDPBackend,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    softmax_scale: float,
) -> Tensor:
    """Run `kernel` on views in its own order [B, N, S, D] and return [S, B, N, D]; plain or causal only."""
    assert mask.segment_ids_BS is None and mask.cu_seqlens is None and mask.window is None
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


def probe(kernel: SDPBackend, request: Request) -> str | None:
    """Run `kernel` forward and backward on a few tokens; PyTorch's reason if it refuses the request, or None.

    Its conditions (head size, length, card, version of cuDNN) differ by release: trying is the sure answer.
    """
    N, G, D = request.num_heads, request.num_groups, request.head_dim
    qkv_SBX = torch.zeros(
        (min(request.seq_length, PROBE_LENGTH), 1, (N + 2 * G) * D),
        dtype=request.dtype,
        device=request.device_type,
        requires_grad=True,
    )
    q, k, v = (part.unflatten(-1, (-1, D)) for part in qkv_SBX.split((N * D, G * D, G * D), dim=-1))
    with _all_warnings() as said, torch.enable_grad():
        try:
            sdpa(kernel, q, k, v, MaskSpec(), D**-0.5).sum().backward()
        except RuntimeError as error:
            told = [str(warning.message).split(" (Triggered")[0].rstrip(".") for warning in said]
            reasons = [text for text in told if not text.endswith(("because:", "runtime disabled"))]
            return "PyTorch refuses it: " + "; ".join(reasons or [str(error).splitlines()[0]])
    return None


@contextmanager
def _all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings, also those that PyTorch gives only once a process: they hold its reasons."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        torch.set_warn_always(before)
