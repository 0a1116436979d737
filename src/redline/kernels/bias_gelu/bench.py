"""Sizes at which bias + GELU is timed: the ffn sizes of GPT-1.3B and of a larger model."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, twins
from redline.kernels.bias_gelu.op import bias_gelu
from redline.kernels.bias_gelu.reference import bias_gelu_reference


def _case(rows: int, cols: int) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((rows, cols), (cols,))
        return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    return BenchCase(
        op="bias_gelu",
        name=f"{rows} x {cols}",
        make_inputs=make_inputs,
        providers=twins(bias_gelu, bias_gelu_reference),
        bytes_forward=2 * rows * cols * 2 + cols * 2,
        bytes_backward=3 * rows * cols * 2 + 2 * cols * 2,
    )


CASES = (_case(16384, 8192), _case(8192, 16384))
