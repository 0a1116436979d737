"""Sizes at which GEGLU is timed: an ffn size of 16,384, 8,192 tokens; and gpt-oss's quick, limited gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from redline.kernels.bench_case import LIMITED, BenchCase, Provider, twins
from redline.kernels.bias_geglu.op import bias_geglu
from redline.kernels.bias_geglu.reference import GeluForm, bias_geglu_reference


def _liger() -> Provider:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply  # type: ignore[no-any-return]


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    """Gate and up in tensors of their own: liger has no kernel for them side by side."""
    return tuple(half.detach().clone().requires_grad_() for half in x.chunk(2, dim=-1))


def _case(rows: int, cols: int, with_bias: bool, form: GeluForm = "tanh", limited: bool = False) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((rows, 2 * cols), (2 * cols,)) if with_bias else ((rows, 2 * cols),)
        return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    bias_bytes = 2 * cols * 2 if with_bias else 0
    alone = with_bias or form != "tanh"
    libraries = {} if alone else {"liger": _liger}
    adapted = {} if alone else {"liger": _halves}
    words: dict[str, Any] = {"approximate": form, **(LIMITED if limited else {})}
    return BenchCase(
        op="bias_geglu",
        name=f"{rows} x 2*{cols}"
        + (" + bias" if with_bias else "")
        + ("" if form == "tanh" else f", {form}")
        + (", limited" if limited else ""),
        make_inputs=make_inputs,
        providers=twins(partial(bias_geglu, **words), partial(bias_geglu_reference, **words), **libraries),
        bytes_forward=3 * rows * cols * 2 + bias_bytes,
        bytes_backward=5 * rows * cols * 2 + 2 * bias_bytes,
        adapted=adapted,
    )


CASES = (
    _case(8192, 16384, False),
    _case(8192, 16384, True),
    _case(8192, 16384, False, "exact"),
    _case(8192, 16384, True, "quick", True),
)
