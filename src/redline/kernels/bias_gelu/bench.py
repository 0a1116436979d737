"""Sizes at which bias + GELU is timed: the ffn sizes of GPT-1.3B and of a larger model."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu

from redline.kernels.bench_case import BenchCase, twins
from redline.kernels.bias_gelu.op import bias_gelu
from redline.kernels.bias_gelu.reference import GeluForm, bias_gelu_reference


def _case(rows: int, cols: int, form: GeluForm = "tanh") -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((rows, cols), (cols,))
        return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    return BenchCase(
        op="bias_gelu",
        name=f"{rows} x {cols}" + ("" if form == "tanh" else f", {form}"),
        make_inputs=make_inputs,
        providers=twins(
            partial(bias_gelu, approximate=form),
            partial(bias_gelu_reference, approximate=form),
            torch=lambda: lambda x, bias: gelu(x + bias, approximate="none" if form == "exact" else form),
        ),
        bytes_forward=2 * rows * cols * 2 + cols * 2,
        bytes_backward=3 * rows * cols * 2 + 2 * cols * 2,
    )


CASES = (_case(16384, 8192), _case(8192, 16384), _case(16384, 8192, "exact"))
