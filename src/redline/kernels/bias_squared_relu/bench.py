"""Sizes at which bias + squared ReLU is timed: with a bias, and without as models have it."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, twins
from redline.kernels.bias_squared_relu.op import bias_squared_relu
from redline.kernels.bias_squared_relu.reference import bias_squared_relu_reference


def _case(rows: int, cols: int, with_bias: bool) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((rows, cols), (cols,)) if with_bias else ((rows, cols),)
        return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    bias_bytes = cols * 2 if with_bias else 0
    return BenchCase(
        op="bias_squared_relu",
        name=f"{rows} x {cols}" + (" + bias" if with_bias else ""),
        make_inputs=make_inputs,
        providers=twins(bias_squared_relu, bias_squared_relu_reference),
        bytes_forward=2 * rows * cols * 2 + bias_bytes,
        bytes_backward=3 * rows * cols * 2 + 2 * bias_bytes,
    )


CASES = (_case(16384, 8192, False), _case(16384, 8192, True))
