"""Finding and reporting gradients that are NaN or infinite.

A step learns that something is wrong from the gradient norm, which it needs anyway. Only then are the
parameters looked at one by one. They are reported in backward order: the first gradient that backward made
bad is the nearest to the cause, and spoils those after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def count_nonfinite(grads: Sequence[Sequence[Tensor]]) -> Tensor:
    """[len(grads)] float64: how many tensors of each list hold a NaN or an infinity.

    One read of the gradients, no temporaries of their size, no wait for the device.
    """
    lists = [[part for part in parts if part.numel()] for parts in grads]
    device = next((part.device for parts in lists for part in parts), torch.device("cpu"))
    counts = [
        torch.stack([~torch.stack(torch.aminmax(part)).double().isfinite().all() for part in parts]).sum()
        if parts
        else torch.zeros((), device=device)
        for parts in lists  # a NaN anywhere makes both extremes NaN
    ]
    return torch.stack([count.double() for count in counts]) if counts else torch.zeros(0)


def nonfinite_error(found: NonFinite, applied_steps: int) -> TrainingError:
    """The error that stops a run; the step was not applied."""
    return TrainingError(
        f"after {applied_steps} optimizer steps, {found}.",
        "this step was not applied: weights and optimizer state are those of the step before.",
        "lower --lr or lengthen --lr-warmup-iters, look at this step's data, or go on past such steps with "
        "--nonfinite-action skip.",
    )
