"""Sizes at which SwiGLU is timed: the ffn sizes of Llama-3 8B and 1B, 8,192 tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from redline.kernels.bench_case import LIMITED, BenchCase, Provider, twins
from redline.kernels.bias_swiglu.op import bias_swiglu
from redline.kernels.bias_swiglu.reference import bias_swiglu_reference


def _liger() -> Provider:
    from liger_kernel.ops import swiglu

    if whole := getattr(swiglu, "LigerFusedGateUpSiLUMulFunction", None):  # spares the copies of the halves
        return lambda x: whole.apply(x)
    return lambda x: swiglu.LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1))


def _case(rows: int, cols: int, with_bias: bool, limited: bool = False) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((rows, 2 * cols), (2 * cols,)) if with_bias else ((rows, 2 * cols),)
        return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    bias_bytes = 2 * cols * 2 if with_bias else 0
    libraries = {} if with_bias or limited else {"liger": _liger}
    form: dict[str, Any] = LIMITED if limited else {}
    return BenchCase(
        op="bias_swiglu",
        name=f"{rows} x 2*{cols}" + (" + bias" if with_bias else "") + (", limited" if limited else ""),
        make_inputs=make_inputs,
        providers=twins(partial(bias_swiglu, **form), partial(bias_swiglu_reference, **form), **libraries),
        bytes_forward=3 * rows * cols * 2 + bias_bytes,
        bytes_backward=5 * rows * cols * 2 + 2 * bias_bytes,
    )


CASES = (
    _case(8192, 14336, False),
    _case(8192, 8192, False),
    _case(8192, 14336, True),
    _case(8192, 14336, False, True),
)
