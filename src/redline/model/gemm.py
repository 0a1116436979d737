"""The GEMM of a site: one autograd Function that adds the weight gradient straight into `main_grad`.

The sum over microbatches then costs no pass of its own (0 to 13 % of the GEMM's time on an H200), and is
rounded in the gradient's dtype only. See main_grad.py for the rule that all parameters follow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.model.main_grad import main_grad_of

# The update is one mutating operator, so that a compiler neither splits it nor copies the buffer.
_library = torch.library.Library("redline", "FRAGMENT")
_library.define("add_wgrad(Tensor(a!) main_grad, Tensor dy_TO, Tensor x_TI, bool fuse) -> ()")


def add_wgrad(main_grad_OI: Tensor, dy_TO: Tensor, x_TI: Tensor, fuse: bool) -> None:
    """main_grad += dy^T x.

    fuse: inside the GEMM, summed and rounded in main_grad's dtype. Otherwise the GEMM's result is first
    rounded to the compute dtype and then added: one more pass over the weights.
    """
    if not fuse:
        main_grad_OI += dy_TO.T @ x_TI
    elif main_grad_OI.dtype == x_TI.dtype:
        main_grad_OI.addmm_(dy_TO.T, x_TI)
    elif main_grad_OI.is_cuda and main_grad_OI.dtype == torch.float32:
        torch.addmm(main_grad_OI, dy_TO.T, x_TI, out_dtype=torch.float32, out=main_grad_OI)
    else:  # no CPU kernel takes half operands and a wide sum
        main_grad_OI.addmm_(dy_TO.T.to(main_grad_OI.dtype), x_TI.to(main_grad_OI.dtype))


_library.impl("add_wgrad", add_wgrad, "CompositeExplicitAutograd")
torch.library.register_fake("redline::add_wgrad", lambda main_grad, dy_TO, x_TI, fuse: None, lib=_library)


class GemmFn(torch.autograd.Function):
    """y = x W^T + b. Saves x and W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        weight_main_grad: Tensor | None,
        bias_main_grad: Tensor | None,
        fuse_wgrad: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.weight_main_grad, ctx.bias_main_grad = weight_main_grad, bias_main_grad
        ctx.fuse_wgrad = fuse_wgrad
        y_TO = F.linear(x.flatten(0, -2), weight_OI, bias_O)
        # Its own tensor for autograd, not a view: the rotary kernel works in it, in place.
        y: Tensor = torch.ops.aten._unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[1]))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        dx = dy @ weight_OI if ctx.needs_input_grad[0] else None
        weight_grad, bias_grad = parameter_grads(ctx, dy.flatten(0, -2), x.flatten(0, -2))
        return dx, weight_grad, bias_grad, None, None, None


def parameter_grads(ctx: Any, dy_TO: Tensor, x_TI: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, or None for each that was added to its `main_grad`.

    `ctx` is that of a Function whose first inputs are x, weight, bias, and which keeps both `main_grad`s and
    `fuse_wgrad` as attributes.
    """
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    weight_grad = bias_grad = None
    if needs_weight and ctx.weight_main_grad is None:
        weight_grad = dy_TO.T @ x_TI
    elif needs_weight:
        add = torch.ops.redline.add_wgrad if torch.compiler.is_compiling() else add_wgrad
        add(ctx.weight_main_grad, dy_TO, x_TI, ctx.fuse_wgrad)
    if needs_bias and ctx.bias_main_grad is None:
        bias_grad = dy_TO.sum(0)
    elif needs_bias:
        ctx.bias_main_grad += dy_TO.sum(0, dtype=ctx.bias_main_grad.dtype)
    return weight_grad, bias_grad


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, fuse_wgrad: bool = True) -> Tensor:
    """y = x W^T + b, with gradients of W and b added to their `main_grad` where they have one.

    Shapes: [..., I], [O, I], [O] -> [..., O]; all of one dtype, x of any strides and at least two dimensions.

    Args:
        fuse_wgrad: add the weight gradient inside its GEMM (see `add_wgrad`).
    """
    main_grads = main_grad_of(weight_OI), main_grad_of(bias_O)
    y: Tensor = GemmFn.apply(x, weight_OI, bias_O, *main_grads, fuse_wgrad)
    return y
