"""A site in fp8 as one node of a compiled graph (`--use-torch-compile`).

What a site does depends on the step: tensors are measured or cast by a known scale, what casts lose is
counted or not, a weight gradient is written or added. A graph for all layers and steps cannot hold that, so
it holds an operator that runs the site's Function as eager code would, forward and backward: the same bits,
and nothing is compiled twice. What the Function makes and saves stays with the site until its backward asks
for it, the newest first. An input that it saves is left to autograd: the compiler, which knows of no reader
after the operator, would write the next tensor into its memory.

Where recompute drops what is before the site, it keeps nothing: its backward is given the site's input, which
the compiler makes again, and casts it again. That forward changes nothing, so the compiler may repeat it too.
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
_library.define("fp8_site_bwd_of(Tensor dy, Tensor x, Tensor number) -> Tensor")  # which saves its input
# Of a site that keeps nothing. A repeated cast raises amax to what it is already.
_library.define("fp8_site_again(Tensor x, Tensor number, int width) -> Tensor")
_library.define("fp8_site_again_bwd(Tensor dy, Tensor x, Tensor number) -> Tensor")


class _Kept:
    """What autograd's context is to a Function: saved tensors, and which inputs want a gradient."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self._given_up: list[bool] = []

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def maybe_clear_saved_tensors(self) -> None:
        self.saved_tensors = ()

    def give_up(self, x: Tensor) -> None:
        """Hold nothing of x: `take_back` will bring it."""
        place = x.data_ptr()
        same = [each is not None and each.data_ptr() == place for each in self.saved_tensors]
        self._given_up, kept = same, zip(self.saved_tensors, same, strict=True)
        self.saved_tensors = tuple(None if gone else each for each, gone in kept)

    def take_back(self, x: Tensor) -> None:
        x_TI, kept = x.flatten(0, -2), zip(self.saved_tensors, self._given_up, strict=True)
        self.saved_tensors = tuple(x_TI if gone else each for each, gone in kept)


class OpaqueSite:
    """`function.apply(x, *rest)` [..., width], of whose gradients only that of x is returned.

    Args:
        function: one of the fp8 sites'; gradients of parameters go to their main_grad.
        rest: its arguments after x.
        width: of its output.
        token: any tensor on the device; one for all sites will do.
        again: keep nothing but x, and have `function.cast` save the rest once the gradient has come.
        keeps_x: what the function saves has x among it.
    """

    def __init__(
        self,
        function: Any,
        rest: tuple[Any, ...],
        width: int,
        token: Tensor,
        *,
        again: bool = False,
        keeps_x: bool = False,
    ) -> None:
        self.function, self.rest, self.width, self.token = function, rest, width, token
        self.again, self.keeps_x = again, keeps_x
        self.parameters = tuple(each for each in rest if isinstance(each, Tensor))
        number = max(_sites, default=0) + 1
        self.number = torch.tensor(number)
        self._kept: list[_Kept] = []
        _sites[number] = self

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            y: Tensor = torch.ops.redline.fp8_site(x, self.number, self.token, self.width, False)
        elif self.again:
            y = AgainFn.apply(x, self.number, self.width, *self.parameters)
        else:
            y = OpaqueFn.apply(x, self.number, self.token, self.width, self.keeps_x, *self.parameters)
        return y

    def forward(self, x: Tensor, keep: bool) -> Tensor:
        """The Function's forward; with `keep` its backward will follow."""
        kept = self._nothing_kept()
        y: Tensor = self.function.forward(kept, x, *self.rest)
        if keep:
            if self.keeps_x:
                kept.give_up(x)
            self._kept.append(kept)
        return y

    def backward(self, dy: Tensor, x: Tensor | None = None) -> Tensor:
        """The gradient of x, of the newest forward that was kept; x where the Function saved it."""
        kept = self._kept.pop()
        if x is not None:
            kept.take_back(x)
        dx: Tensor = self.function.backward(kept, dy)[0]
        return dx

    def backward_again(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, of a forward of x that kept nothing."""
        kept = self._nothing_kept()
        self.function.cast(kept, x, *self.rest)
        dx: Tensor = self.function.backward(kept, dy)[0]
        return dx

    def _nothing_kept(self) -> _Kept:
        wanted = (isinstance(each, Tensor) and each.requires_grad for each in self.rest)
        return _Kept((True, *wanted))


class OpaqueFn(torch.autograd.Function):
    """The operators; parameters are arguments so that autograd knows of them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, number: Tensor, token: Tensor, width: int, keeps_x: bool, *parameters: Tensor
    ) -> Tensor:
        ctx.number, ctx.width = number, x.shape[-1]
        ctx.save_for_backward(*([x] if keeps_x else []))
        y: Tensor = torch.ops.redline.fp8_site(x, number, token, width, True)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved_tensors:
            dx = torch.ops.redline.fp8_site_bwd_of(dy, *ctx.saved_tensors, ctx.number)
        else:
            dx = torch.ops.redline.fp8_site_bwd(dy, ctx.number, ctx.width)
        return dx, *(None,) * (len(ctx.needs_input_grad) - 1)


class AgainFn(torch.autograd.Function):
    """The operators that keep nothing. Saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor, width: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.number = number
        y: Tensor = torch.ops.redline.fp8_site_again(x, number, width)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = torch.ops.redline.fp8_site_again_bwd(dy, *ctx.saved_tensors, ctx.number)
        return dx, *(None,) * (len(ctx.needs_input_grad) - 1)


def _forward(x: Tensor, number: Tensor, token: Tensor, width: int, keep: bool) -> Tensor:
    return _sites[int(number)].forward(x, keep)


def _backward(dy: Tensor, number: Tensor, width: int) -> Tensor:
    return _sites[int(number)].backward(dy)


def _backward_of(dy: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return _sites[int(number)].backward(dy, x)


def _forward_again(x: Tensor, number: Tensor, width: int) -> Tensor:
    return _sites[int(number)].forward(x, keep=False)


def _backward_again(dy: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return _sites[int(number)].backward_again(dy, x)


def _as_wide(x: Tensor, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


_library.impl("fp8_site", _forward, "CompositeExplicitAutograd")
_library.impl("fp8_site_bwd", _backward, "CompositeExplicitAutograd")
_library.impl("fp8_site_bwd_of", _backward_of, "CompositeExplicitAutograd")
_library.impl("fp8_site_again", _forward_again, "CompositeExplicitAutograd")
_library.impl("fp8_site_again_bwd", _backward_again, "CompositeExplicitAutograd")
torch.library.register_fake(
    "redline::fp8_site", lambda x, number, token, width, keep: _as_wide(x, width), lib=_library
)
torch.library.register_fake(
    "redline::fp8_site_bwd", lambda dy, number, width: _as_wide(dy, width), lib=_library
)
torch.library.register_fake(
    "redline::fp8_site_again", lambda x, number, width: _as_wide(x, width), lib=_library
)
for _name in ("fp8_site_bwd_of", "fp8_site_again_bwd"):
    torch.library.register_fake(
        f"redline::{_name}", lambda dy, x, number: dy.new_empty(x.shape), lib=_library
    )
