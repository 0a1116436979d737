"""A small case of RMSNorm, whatever stands for its operator."""

from __future__ import annotations

import torch

from redline.kernels.bench_case import BenchCase, twins
from redline.kernels.rms_norm.reference import rms_norm_reference


def norm_case(fused, dtype=torch.bfloat16) -> BenchCase:
    def make_inputs(device, dtype):
        x = torch.randn(12, 40, device=device, dtype=dtype, requires_grad=True)
        return x, torch.randn(40, device=device, dtype=dtype, requires_grad=True)

    eager = lambda x, weight: rms_norm_reference(x, weight, 1e-5)  # noqa: E731
    return BenchCase(
        op="rms_norm",
        name="12 x 40",
        make_inputs=make_inputs,
        providers=twins(fused, eager),
        bytes_forward=1,
        dtype=dtype,
    )
