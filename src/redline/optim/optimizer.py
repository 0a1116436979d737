"""One optimizer step: unscale, check, clip, update, round into the parameters.

Everything is decided on the device: the norm makes a divisor (loss scale over clip coefficient) and a skip
flag, which the fused AdamW reads where they are. The host waits once, after all work of the step is queued,
for the few numbers that it logs and that move the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.optim.adam import AdamW
from redline.optim.adam_options import AdamOptions, Step
from redline.optim.adam_triton import norm_and_nonzeros
from redline.optim.clip import clip_coefficient, count_nonzero, l2_norm
from redline.optim.data_parallel import DataParallel
from redline.optim.flat import FlatBuffers
from redline.optim.loss_scale import ConstantLossScale, LossScale
from redline.optim.nonfinite import NonFinite, NonFiniteAction, nonfinite_error
from redline.optim.shared import SharedParameters, agreed


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did.

    Attributes:
        grad_norm: global norm of the gradients, unscaled, before clipping.
        applied: False when the step was skipped; weights and moments are then bitwise unchanged.
        loss: the loss that was passed in, read with the same wait.
        loss_scale: that this step's gradients carried.
        num_zeros: gradient elements that are exactly zero, None when not counted.
        nonfinite: what was NaN or infinite, None in a sound step.
        overflow: whether that is only a dynamic loss scale finding its place, and no error.
    """

    grad_norm: float
    applied: bool
    loss: float | None
    loss_scale: float
    num_zeros: int | None
    nonfinite: NonFinite | None
    overflow: bool = False

    @property
    def bad_parameter(self) -> str | None:
        """The first parameter, in backward order, whose gradient was not finite."""
        return self.nonfinite.parameters[0] if self.nonfinite and self.nonfinite.parameters else None


class Optimizer:
    """AdamW on flat buffers with clipping, loss scaling and the NaN check.

    Args:
        buffers: parameters, gradients and moments. The moments start at zero and exist from here on, so a
            state can be saved before the first step.
        adam: betas, eps, implementation.
        clip_grad: largest global gradient norm, 0 disables.
        loss_scale: the scale that the caller multiplies the loss by; `loss_scale.scale` before each step.
        nonfinite_action: on NaN or Inf in the loss or gradient norm raise ("stop"), leave the step out
            ("skip"), or apply it nevertheless ("ignore"). A dynamic loss scale always leaves overflowed
            steps out, and only an overflow at its floor, or a loss that is not finite, counts as an error.
        log_num_zeros: count zero gradient elements (one more read of the gradients).
        shared: what other tensor-parallel ranks hold too.
        ranks: how the gradients and parameters of data-parallel ranks meet; None: there is one rank.
        overlap_away: states in host memory travel while others are updated.
        fused_norm: one kernel finds norm and zeros of the gradients.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        *,
        adam: AdamOptions,
        clip_grad: float = 1.0,
        loss_scale: LossScale | None = None,
        nonfinite_action: NonFiniteAction = "stop",
        log_num_zeros: bool = False,
        shared: SharedParameters | None = None,
        ranks: DataParallel | None = None,
        overlap_away: bool = True,
        fused_norm: bool = False,
    ) -> None:
        self.buffers = buffers
        self.ranks = ranks or DataParallel(buffers)
        self.adam = AdamW(buffers, adam, overlap=overlap_away)
        self.loss_scale = loss_scale or ConstantLossScale()
        self.applied_steps = 0
        self.skipped_steps = 0
        self._clip_grad = clip_grad
        self._action = nonfinite_action
        self._log_num_zeros = log_num_zeros
        self._fused_norm = fused_norm
        self._shared = shared or SharedParameters()
        self._num_elements = self._shared.num_counted(buffers)
        self._may_skip = nonfinite_action != "ignore" or not isinstance(self.loss_scale, ConstantLossScale)

    def step(
        self,
        lr: float,
        weight_decay: float,
        *,
        decoupled_lr: float | None = None,
        loss: Tensor | None = None,
        after_update: Callable[[], object] = lambda: None,
    ) -> StepResult:
        """Update the parameters from `main_grad`, which holds loss_scale times the gradient.

        Args:
            lr, weight_decay: of this step.
            decoupled_lr: learning rate of word embedding and head; None means `lr`.
            loss: the step's loss, unscaled, a scalar on the device; it takes part in the check.
            after_update: called once the parameters are updated (or left alone), before they are sent.

        The gradients are left as they are or divided; zero them before the next backward.
        Raises: TrainingError on a non-finite step under "stop", with the step left out.
        """
        scale = self.loss_scale.scale
        self.ranks.gatherer.finish()  # of parts that no forward pass has asked for
        self._shared.sum_partial(self.buffers)
        scaled_norm, num_zeros = self._measure()
        norm = scaled_norm / scale
        facts = self._facts(norm, loss, num_zeros)
        self.adam.step(
            Step(
                number=self.applied_steps + 1,
                lr=lr,
                weight_decay=weight_decay,
                decoupled_lr=decoupled_lr,
                grad_scale=self._divisor(norm, scale),
                found_inf=facts[0] if self._may_skip else None,
            )
        )
        after_update()
        self.ranks.gatherer.start()
        return self._conclude(facts, has_loss=loss is not None)

    def _measure(self) -> tuple[Tensor, Tensor | None]:
        """The norm of the gradients as they are, and how many of them are 0, None when nobody asks.

        Each rank reads its own part of the gradients, and the parts are added up. Where other tensor-parallel
        ranks hold the same gradients, one measures them; but each would update its own copy, so what is not
        finite in any of them is in the norm of all.
        """
        grads, device = self.ranks.own_grads(self._shared), self.buffers.device
        if self._fused_norm and grads:
            norm, nonzeros = norm_and_nonzeros(grads)
        else:
            norm = l2_norm(grads, device)
            nonzeros = count_nonzero(grads, device) if self._log_num_zeros else norm
        if copies := self.ranks.own_copies(self._shared):
            elsewhere = l2_norm(copies, device)
            norm = torch.where(elsewhere.isfinite(), norm, elsewhere)
        norm, nonzeros = self.ranks.add_up(norm, nonzeros)
        zeros = self._shared.total(self._num_elements - nonzeros) if self._log_num_zeros else None
        return self._shared.norm(norm), zeros

    def _facts(self, norm: Tensor, loss: Tensor | None, num_zeros: Tensor | None) -> Tensor:
        """[found_inf, norm, loss, num_zeros] in float64 on the device; 0 stands for what is not there."""
        none = torch.zeros_like(norm)
        loss = none if loss is None else loss.detach().to(norm)
        found_inf = ~(norm.isfinite() & loss.isfinite())
        return torch.stack([found_inf.double(), norm, loss, none if num_zeros is None else num_zeros])

    def _divisor(self, norm: Tensor, scale: float) -> Tensor | None:
        """What the update divides gradients by, or None for 1. A bad norm clips nothing: it would spread."""
        if self._clip_grad == 0 and scale == 1.0:
            return None
        coefficient = torch.where(norm.isfinite(), clip_coefficient(norm, self._clip_grad), 1.0)
        return scale / coefficient

    def _conclude(self, facts: Tensor, has_loss: bool) -> StepResult:
        """Wait for the device, count the step, move the loss scale, and say or raise what was not finite."""
        found_inf, norm, loss_value, num_zeros = facts.tolist()
        scale, loss = self.loss_scale.scale, loss_value if has_loss else None
        applied = not (found_inf and self._may_skip)
        self.applied_steps += applied
        self.skipped_steps += not applied
        overflow = bool(found_inf) and self.loss_scale.expects_overflow() and math.isfinite(loss_value)
        self.loss_scale.update(bool(found_inf))

        nonfinite = None
        if found_inf:
            nonfinite = NonFinite(loss, norm, self._nonfinite_parameters())
            if self._action == "stop" and not overflow:
                raise nonfinite_error(nonfinite, self.applied_steps)
        zeros = int(num_zeros) if self._log_num_zeros else None
        return StepResult(norm, applied, loss, scale, zeros, nonfinite, overflow)

    def params_norm(self) -> float:
        """Euclidean norm of all main parameters, frozen ones included. Waits for the device."""
        norm = self.ranks.params_norm(self._shared)
        return self._shared.norm(norm).item()

    def _nonfinite_parameters(self) -> tuple[str, ...]:
        names, bad = self.ranks.nonfinite_parameters()
        found = agreed(bad, self._shared.group).tolist() if names else []
        return tuple(name for name, each in zip(names, found, strict=True) if each)

    def publish_params(self) -> None:
        """After something filled the main parameters: round them, and bring all parts to every rank."""
        self.buffers.sync_params()
        self.ranks.gatherer.start(at_once=True)

    def settle(self) -> None:
        """Wait for parameters that are still on their way, before anybody but the model reads them."""
        self.ranks.gatherer.finish()

    def state_values(self) -> dict[str, Any]:
        """The state beside tensors, as JSON values; tensors are `buffers.views` of main_param and moments."""
        return {
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.loss_scale.state_values(),
        }

    def load_state_values(self, values: Mapping[str, Any]) -> None:
        """Go on from `state_values`. Raises: CheckpointError when something is missing."""
        missing = self.state_values().keys() - values.keys()
        if missing:
            raise CheckpointError(
                f"the checkpoint's optimizer state lacks {', '.join(sorted(missing))}.",
                "Adam's bias correction depends on the number of steps taken.",
                "load another checkpoint, or start the optimizer afresh with --no-load-optim.",
            )
        self.applied_steps = int(values["applied_steps"])
        self.skipped_steps = int(values["skipped_steps"])
        self.loss_scale.load_state_values(values["loss_scale"])
