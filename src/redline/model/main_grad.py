"""Where gradients go: parameters with a `main_grad` get them there, added in place, and never a `.grad`.

`main_grad` is a view of the flat gradient buffer in the gradient dtype (fp32 under bf16). Plain autograd
would make one more tensor a parameter and microbatch, in the compute dtype, only for it to be added and
thrown away, and would round it each time. So every read of a parameter goes through a Function that adds to
`main_grad` in backward and returns None: gemm.py for matrices, this file for the rest. Without the
attribute the gradient is autograd's own.

`main_grad` goes onto the context as an attribute. Through save_for_backward, two microbatches in flight
would fail: the first backward changes it in place, and the second finds another version than was saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def main_grad_of(param: Tensor | None) -> Tensor | None:
    """The buffer view that this parameter's gradient is added to, or None: autograd then makes a `.grad`."""
    return getattr(param, "main_grad", None)


class ReadFn(torch.autograd.Function):
    """A parameter in a wide dtype; its gradient is added to `main_grad` in that dtype."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, main_grad: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.main_grad = main_grad
        return param.to(dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.main_grad += grad
        return None, None, None


def read(param: Tensor) -> Tensor:
    """A small parameter (norm, bias) in fp32 (fp64 for fp64), as the plain operations want it."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    main_grad = main_grad_of(param)
    if main_grad is None:
        return param.to(dtype)
    wide: Tensor = ReadFn.apply(param, main_grad, dtype)
    return wide


class EmbeddingFn(torch.autograd.Function):
    """Rows of a table; the gradient is added to the rows of `main_grad`: no dense [V, H] tensor is made."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight_VH: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.main_grad = main_grad
        return F.embedding(index, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        (index,) = ctx.saved_tensors
        ctx.main_grad.index_add_(0, index.flatten(), dy.flatten(0, -2).to(ctx.main_grad.dtype))
        return None, None, None


def embed(index: Tensor, weight_VH: Tensor) -> Tensor:
    """weight[index]: int64 [...] and [V, H] -> [..., H]."""
    main_grad = main_grad_of(weight_VH)
    if main_grad is None:
        return F.embedding(index, weight_VH)
    rows: Tensor = EmbeddingFn.apply(index, weight_VH, main_grad)
    return rows
