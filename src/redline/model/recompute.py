"""Activations that are computed again: a part of the model that keeps its inputs alone.

`checkpoint` runs a function without recording it and runs it again, recorded, once its gradient has come.
Nothing else is needed for the same bits: dropout is a function of keys and counters, so no generator is saved
or set back, and weight gradients reach `main_grad` in backward alone, which happens once. Parameters that the
function reads are no arguments of it; their gradients are made by the inner backward, where their hooks fire.

Where tensor-parallel ranks hold the same input, each may keep its part alone (`spread`): they gather it again
in backward. Their bits are equal, since every one of them has the result of the same all-reduce.

`rebuilt` keeps the input of a norm or an activation in place of its output, and makes the output anew when
the GEMM that reads it asks for what it saved. Nothing else runs again, and no storage is resized.

Inside a compiled block there is nobody to ask: forward and backward are one graph, which the compiler cuts in
two. There both functions mark their operators, and the compiler drops what those make and repeats them in the
backward graph, just before what reads them and as far as it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint as marked

from redline.comm.collectives import all_gather
from redline.comm.groups import Group


class CheckpointFn(torch.autograd.Function):
    """y = run(*inputs). Saves the inputs; of the first, with `spread`, this rank's part."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], spread: Group | None, *inputs: Tensor) -> Tensor:
        ctx.run, ctx.spread, ctx.size = run, spread, inputs[0].shape
        first = inputs[0] if spread is None else _own_share(inputs[0], spread)
        ctx.save_for_backward(first, *inputs[1:])
        return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        first, *others = ctx.saved_tensors
        if ctx.spread is not None:
            first = all_gather(first, ctx.spread)[: ctx.size.numel()].view(ctx.size)
        caught: list[Tensor | None] = [None] * (1 + len(others))
        with torch.enable_grad():
            inputs = [
                CaughtFn.apply(saved.detach().requires_grad_(), caught, place) if needed else saved
                for place, (saved, needed) in enumerate(
                    zip((first, *others), ctx.needs_input_grad[2:], strict=True)
                )
            ]
            edge = get_gradient_edge(ctx.run(*inputs))  # the output itself is of no use
        torch.autograd.backward((edge,), (dy,))
        return None, None, *caught


class CaughtFn(torch.autograd.Function):
    """x, whose gradient is left in `caught` as it comes.

    A leaf would copy it into strides of its own, and what sums it up behind would round otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, caught: list[Tensor | None], place: int) -> Tensor:
        ctx.caught, ctx.place = caught, place
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        ctx.caught[ctx.place] = dx
        return None, None, None


def _own_share(x: Tensor, group: Group) -> Tensor:
    """A copy of this rank's part of x, flat: [ceil(elements / ranks)], zeros behind the last element."""
    share = -(-x.numel() // group.size)
    part = x.new_zeros(share)
    own = x.flatten()[group.index * share : (group.index + 1) * share]
    part[: own.numel()] = own
    return part


def checkpoint(run: Callable[..., Tensor], *inputs: Tensor, spread: Group | None = None) -> Tensor:
    """run(*inputs), of which only the inputs are kept for backward.

    Args:
        run: from tensors to one new tensor (no input and no view of one); the same function of its inputs
            whenever it is called.
        inputs: every tensor that a gradient must flow to, other than parameters.
        spread: ranks that all hold the same first input, of which each keeps a part
            (`--distribute-saved-activations`).
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    if torch.compiler.is_compiling():
        return _repeated(run, *inputs)
    if not any(each.requires_grad for each in inputs):  # else the parameters inside would get no gradient
        inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    y: Tensor = CheckpointFn.apply(run, spread, *inputs)
    return y


def _repeated(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """run(*inputs), its operators marked for the compiler: what they make is not kept but made again."""
    y: Tensor = marked(run, *inputs, use_reentrant=False)
    return y


@dataclass(slots=True)
class _Again:
    """The second making of a tensor: its input, and where its gradient enters."""

    caught: list[Tensor | None] = field(default_factory=list)
    edge: GradientEdge | None = None

    def make(self, make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `make` recorded; the result itself is not held here."""
        self.caught = [None]
        with torch.enable_grad():
            made = make(CaughtFn.apply(x.detach().requires_grad_(), self.caught, 0))
        self.edge = get_gradient_edge(made)
        return made.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """The gradient of the input, from that of what was made."""
        assert self.edge is not None
        torch.autograd.backward((self.edge,), (gradient,))
        found, self.edge = self.caught.pop(), None
        return found


class RebuiltFn(torch.autograd.Function):
    """y = make(x). Saves x; `again` has made y once more by the time its gradient comes."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[Tensor], Tensor], x: Tensor, again: _Again) -> Tensor:
        ctx.make, ctx.again = make, again
        ctx.save_for_backward(x)
        return make(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        again: _Again = ctx.again
        if again.edge is None:  # nobody asked for y: its reader had saved nothing of it
            again.make(ctx.make, *ctx.saved_tensors)
        return None, again.backward(dy), None


def rebuilt(make: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
    """use(make(x)), of which make(x) and all that leads to it are dropped; x is kept.

    When `use` asks in backward for what it saved of make(x), it is made again, once, for that and for the
    gradient of x.
    """
    if not torch.is_grad_enabled():
        return use(make(x))
    if torch.compiler.is_compiling():
        return use(_repeated(make, x))
    again = _Again()
    made: Tensor = RebuiltFn.apply(make, x, again)
    source, place, size = x.detach(), made.data_ptr(), made.numel()

    def drop(saved: Tensor) -> Tensor | None:
        return None if saved.data_ptr() == place and saved.numel() == size else saved

    def make_again(kept: Tensor | None) -> Tensor:
        return again.make(make, source) if kept is None else kept

    with torch.autograd.graph.saved_tensors_hooks(drop, make_again):
        return use(made)
