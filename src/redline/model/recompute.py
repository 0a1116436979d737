"""Activations that are computed again: a part of the model that keeps its inputs alone.

`checkpoint` runs a function without recording it and runs it again, recorded, once its gradient has come.
Nothing else is needed for the same bits: dropout is a function of keys and counters, so no generator is saved
or set back, and weight gradients reach `main_grad` in backward alone, which happens once. Parameters that the
function reads are no arguments of it; their gradients are made by the inner backward, where their hooks fire.

`rebuilt` keeps the input of a norm or an activation in place of its output, and makes the output anew when
the GEMM that reads it asks for what it saved. Nothing else runs again, and no storage is resized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge


class CheckpointFn(torch.autograd.Function):
    """y = run(*inputs). Saves the inputs."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            saved.detach().requires_grad_(needed)
            for saved, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            edge = get_gradient_edge(ctx.run(*inputs))  # the output itself is of no use
        torch.autograd.backward((edge,), (dy,))
        return None, *(each.grad for each in inputs)


def checkpoint(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """run(*inputs), of which only the inputs are kept for backward.

    Args:
        run: from tensors to one new tensor (no input and no view of one); the same function of its inputs
            whenever it is called.
        inputs: every tensor that a gradient must flow to, other than parameters.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    if not any(each.requires_grad for each in inputs):  # else the parameters inside would get no gradient
        inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    y: Tensor = CheckpointFn.apply(run, *inputs)
    return y


@dataclass(slots=True)
class _Again:
    """The second making of a tensor: its input, and where its gradient enters."""

    x: Tensor | None = None
    edge: GradientEdge | None = None

    def make(self, make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `make` recorded; the result itself is not held here."""
        self.x = x.detach().requires_grad_()
        with torch.enable_grad():
            made = make(self.x)
        self.edge = get_gradient_edge(made)
        return made.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """The gradient of the input, from that of what was made."""
        assert self.x is not None and self.edge is not None
        torch.autograd.backward((self.edge,), (gradient,))
        found = self.x.grad
        self.x = self.edge = None
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
    again = _Again()
    made: Tensor = RebuiltFn.apply(make, x, again)
    source, place, size = x.detach(), made.data_ptr(), made.numel()

    def drop(saved: Tensor) -> Tensor | None:
        return None if saved.data_ptr() == place and saved.numel() == size else saved

    def make_again(kept: Tensor | None) -> Tensor:
        return again.make(make, source) if kept is None else kept

    with torch.autograd.graph.saved_tensors_hooks(drop, make_again):
        return use(made)
