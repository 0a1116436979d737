"""Sizes at which scale + mask + softmax is timed: 32 heads, 2,048 and 4,096 positions, causal and not."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, twins
from redline.kernels.masked_softmax.op import masked_softmax
from redline.kernels.masked_softmax.reference import masked_softmax_reference

SCALE = 0.0883883


def _case(B: int, N: int, S: int, causal: bool) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (torch.randn(B, N, S, S, device=device, dtype=dtype, requires_grad=True),)

    # A causal kernel need not read the masked half, but writes its zeros.
    read = S * (S + 1) // 2 if causal else S * S
    return BenchCase(
        op="masked_softmax",
        name=f"{B} x {N} x {S} x {S}" + (", causal" if causal else ""),
        make_inputs=make_inputs,
        providers=twins(
            lambda scores: masked_softmax(scores, SCALE, causal=causal),
            lambda scores: masked_softmax_reference(scores, SCALE, causal),
        ),
        bytes_forward=B * N * (read + S * S) * 2,
        bytes_backward=B * N * (2 * read + S * S) * 2,
        gradient_roundings=2,
    )


CASES = (_case(2, 32, 2048, True), _case(1, 32, 4096, True), _case(2, 32, 2048, False))
