"""Finding and reporting gradients that are NaN or infinite.

A step learns that something is wrong from the gradient norm, which it needs anyway. Only then are the
parameters looked at one by one. They are reported in backward order: the first gradient that backward made
bad is the nearest to the cause, and spoils those after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from redline.errors import TrainingError

NonFiniteAction = Literal["stop", "skip", "ignore"]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What was not finite in a step.

    Attributes:
        loss: the step's loss, None when the step was not told.
        grad_norm: the global gradient norm.
        parameters: names of the parameters with a bad gradient, in backward order.
    """

    loss: float | None
    grad_norm: float
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        parts = []
        if self.loss is not None and not math.isfinite(self.loss):
            parts.append(f"the loss is {self.loss}")
        if self.parameters:
            more = len(self.parameters) - 1
            also = f" and of {more} more parameter{'s' * (more > 1)}" if more else ""
            parts.append(f"the gradient of '{self.parameters[0]}'{also} is NaN or infinite")
        elif not math.isfinite(self.grad_norm):
            parts.append(f"every gradient is finite but their norm is {self.grad_norm}")
        return "; ".join(parts)


def nonfinite_parameters(
    grads: Mapping[str, Tensor], agreed: Callable[[Tensor], Tensor] = lambda bad: bad
) -> tuple[str, ...]:
    """Names whose gradient holds a NaN or an infinity, last registered first (the order of backward).

    One read of the gradients, no temporaries of their size, one wait for the device.

    Args:
        agreed: which are bad on any rank, from those bad here; the names are the same everywhere.
    """
    names = [name for name in reversed(list(grads)) if grads[name].numel()]
    if not names:
        return ()
    extremes = torch.stack([torch.stack(torch.aminmax(grads[name])).double() for name in names])  # [names, 2]
    bad = agreed(~extremes.isfinite().all(dim=1)).tolist()  # a NaN anywhere makes both extremes NaN
    return tuple(name for name, found in zip(names, bad, strict=True) if found)


def nonfinite_error(found: NonFinite, applied_steps: int) -> TrainingError:
    """The error that stops a run; the step was not applied."""
    return TrainingError(
        f"after {applied_steps} optimizer steps, {found}.",
        "this step was not applied: weights and optimizer state are those of the step before.",
        "lower --lr or lengthen --lr-warmup-iters, look at this step's data, or go on past such steps with "
        "--nonfinite-action skip.",
    )
