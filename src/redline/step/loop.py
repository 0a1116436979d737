"""The loop of a run: steps, and after each the periodic actions that are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from redline.data import Microbatch
from redline.step.state import TrainState
from redline.step.stop import StopConditions
from redline.step.train_step import StepOutcome

FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Action:
    """Something done every `every` steps, after the step; None or 0: never by itself.

    Attributes:
        at_end: do it also after the last step, however the run ends.
        at_finish: do it also after the last step of a run that was not cut short.
    """

    name: str
    every: int | None
    run: Callable[[StepOutcome], object]
    at_end: bool = False
    at_finish: bool = False

    def is_due(self, iteration: int, end: str | None) -> bool:
        """Whether to run after step `iteration`, with which the run ends, or goes on (None)."""
        last = (end is not None and self.at_end) or (end == FINISHED and self.at_finish)
        return last or bool(self.every and iteration % self.every == 0)


Step = Callable[[Sequence[Microbatch]], StepOutcome]


class Marking(Protocol):
    """The parts of a turn, as its profiler wants to see them."""

    def step(self, step: Step) -> Step: ...

    def batches(self, stream: Iterator[Sequence[Microbatch]]) -> Iterator[Sequence[Microbatch]]: ...

    def actions(self, actions: Sequence[Action]) -> Sequence[Action]: ...


class Profiler(Protocol):
    """What looks at some turns of the loop; see profile.py."""

    def wants(self, number: int) -> bool: ...

    def turn(self, number: int) -> AbstractContextManager[Marking]: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


def train(
    state: TrainState,
    step: Step,
    batches: Iterable[Sequence[Microbatch]],
    actions: Sequence[Action],
    stop: StopConditions,
    total_iterations: int,
    profiler: Profiler | None = None,
) -> str:
    """Step until `total_iterations` or until `stop` says so; returns why the run ended.

    Args:
        batches: the microbatches of each step, one sequence a step.
        actions: run after each step in this order.
        profiler: runs the turns that it wants; the others cost one question.
    """
    if state.iteration >= total_iterations:
        return FINISHED
    stream, reason = iter(batches), None
    try:
        while reason is None:
            number = state.iteration + 1
            if profiler is None or not profiler.wants(number):
                reason = _turn(state, step, stream, actions, stop, total_iterations)
                continue
            with profiler.turn(number) as marking:
                seen, marked = marking.batches(stream), marking.actions(actions)
                reason = _turn(state, marking.step(step), seen, marked, stop, total_iterations)
    except BaseException:
        if profiler is not None:
            profiler.abandon()
        raise
    if profiler is not None:
        profiler.close()
    return reason


def _turn(
    state: TrainState,
    step: Step,
    stream: Iterator[Sequence[Microbatch]],
    actions: Sequence[Action],
    stop: StopConditions,
    total_iterations: int,
) -> str | None:
    """One step and the actions due after it; why the run ends with it, None when it goes on."""
    started = time.perf_counter()
    microbatches = next(stream, None)
    assert microbatches is not None, "the batches ended before the run"
    waited_s = time.perf_counter() - started
    outcome = replace(step(microbatches), wait_s=waited_s)
    reason = FINISHED if state.iteration >= total_iterations else stop.reason(state.iteration)
    cut_short = reason not in (None, FINISHED)
    # Whoever stops a run may not wait: what does not belong to its end comes last then.
    for action in sorted(actions, key=lambda action: cut_short and action.at_finish):
        if action.is_due(state.iteration, reason):
            action.run(outcome)
    return reason
