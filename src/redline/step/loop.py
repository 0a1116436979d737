"""The loop of a run: steps, and after each the periodic actions that are due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from redline.data import Microbatch
from redline.step.state import TrainState
from redline.step.stop import StopConditions
from redline.step.train_step import StepOutcome, TrainStep

FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Action:
    """Something done every `every` steps, after the step; None or 0: never by itself.

    Attributes:
        at_end: do it also after the last step, however the run ends.
    """

    name: str
    every: int | None
    run: Callable[[StepOutcome], object]
    at_end: bool = False

    def is_due(self, iteration: int, ends: bool) -> bool:
        """Whether to run after step `iteration`."""
        return (ends and self.at_end) or bool(self.every and iteration % self.every == 0)


def train(
    state: TrainState,
    step: TrainStep,
    batches: Iterable[Sequence[Microbatch]],
    actions: Sequence[Action],
    stop: StopConditions,
    total_iterations: int,
) -> str:
    """Step until `total_iterations` or until `stop` says so; returns why the run ended.

    Args:
        batches: the microbatches of each step, one sequence a step.
        actions: run after each step in this order.
    """
    if state.iteration >= total_iterations:
        return FINISHED
    for microbatches in batches:
        outcome = step(microbatches)
        reason = FINISHED if state.iteration >= total_iterations else stop.reason(state.iteration)
        for action in actions:
            if action.is_due(state.iteration, reason is not None):
                action.run(outcome)
        if reason is not None:
            return reason
    raise AssertionError("the batches ended before the run")
