"""The softmax kernel inside unfused attention (--masked-softmax-fusion) against the plain steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from redline.attention import MaskSpec, fused_softmax, unfused_attention

S, B, N, G, D = 13, 2, 4, 2, 8
SEGMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 3 + [-1] * 10])  # padding sees nothing


def run(attention, dtype, device, mask):
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(S, B, n, D, generator=generator).to(device, dtype).requires_grad_() for n in (N, G, G)
    ]
    out = attention(*parts, mask, softmax_scale=0.4)
    out.square().sum().backward()
    return [out.detach(), *(part.grad for part in parts)]


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_plain_softmax(dtype, causal, segments, kernel_device):
    mask = MaskSpec(causal, SEGMENTS.to(kernel_device) if segments else None)
    fused = run(partial(unfused_attention, softmax=fused_softmax), dtype, kernel_device, mask)
    plain = run(unfused_attention, dtype, kernel_device, mask)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)
    if segments:
        assert fused[0][3:, 1].abs().max() == 0
