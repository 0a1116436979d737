"""A site in fp8 as one node of a compiled graph (`--use-torch-compile`).

What a site does depends on the step: tensors are measured or cast by a known scale, what casts lose is
counted or not, a weight gradient is written or added. A graph for all layers and steps cannot hold that, so
it holds an operator that runs the site's Function as eager code would, forward and backward: the same bits,
and nothing is compiled twice. What the Function saves stays with the site until its backward asks for it, the
newest first.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# An operator takes tensors and numbers, so it is told a site's number, as a tensor: a plain number would be
# part of the graph, and each layer have its own.
_sites: WeakValueDictionary[int, OpaqueSite] = WeakValueDictionary()
_library = torch.library.Library("redline", "FRAGMENT")
# The token is not touched: an operator that changes something is not left out, nor run again in backward.
# Backward has none: autograd would find it changed by the sites between. Gradients order it.
_library.define("fp8_site(Tensor x, Tensor number, Tensor(a!) token, int width, bool keep) -> Tensor")
_library.define("fp8_site_bwd(Tensor dy, Tensor number, int width) -> Tensor")


class _Kept:
    """What autograd's context is to a Function: saved tensors, and which inputs want a gradient."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class OpaqueSite:
    """`function.apply(x, *rest)` [..., width], of whose gradients only that of x is returned.

    Args:
        function: one of the fp8 sites'; gradients of parameters go to their main_grad.
        rest: its arguments after x.
        width: of its output.
        token: any tensor on the device; one for all sites will do.
    """

    def __init__(self, function: Any, rest: tuple[Any, ...], width: int, token: Tensor) -> None:
        self.function, self.rest, self.width, self.token = function, rest, width, token
        self.parameters = tuple(each for each in rest if isinstance(each, Tensor))
        number = max(_sites, default=0) + 1
        self.number = torch.tensor(number)
        self._kept: list[_Kept] = []
        _sites[number] = self

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            y: Tensor = torch.ops.redline.fp8_site(x, self.number, self.token, self.width, False)
        else:
            y = OpaqueFn.apply(x, self.number, self.token, self.width, *self.parameters)
        return y

    def forward(self, x: Tensor, keep: bool) -> Tensor:
        """The Function's forward; with `keep` its backward will follow."""
        wanted = (isinstance(each, Tensor) and each.requires_grad for each in self.rest)
        kept = _Kept((True, *wanted))
        y: Tensor = self.function.forward(kept, x, *self.rest)
        if keep:
            self._kept.append(kept)
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """The gradient of x, of the newest forward that was kept."""
        dx: Tensor = self.function.backward(self._kept.pop(), dy)[0]
        return dx


class OpaqueFn(torch.autograd.Function):
    """The operators; parameters are arguments so that autograd knows of them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, number: Tensor, token: Tensor, width: int, *parameters: Tensor
    ) -> Tensor:
        ctx.number, ctx.width = number, x.shape[-1]
        y: Tensor = torch.ops.redline.fp8_site(x, number, token, width, True)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = torch.ops.redline.fp8_site_bwd(dy, ctx.number, ctx.width)
        return dx, *(None,) * (len(ctx.needs_input_grad) - 1)


def _forward(x: Tensor, number: Tensor, token: Tensor, width: int, keep: bool) -> Tensor:
    return _sites[int(number)].forward(x, keep)


def _backward(dy: Tensor, number: Tensor, width: int) -> Tensor:
    return _sites[int(number)].backward(dy)


def _as_wide(x: Tensor, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


_library.impl("fp8_site", _forward, "CompositeExplicitAutograd")
_library.impl("fp8_site_bwd", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "redline::fp8_site", lambda x, number, token, width, keep: _as_wide(x, width), lib=_library
)
torch.library.register_fake(
    "redline::fp8_site_bwd", lambda dy, number, width: _as_wide(dy, width), lib=_library
)
