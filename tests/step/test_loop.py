"""What happens after a step, and in which order when the run ends with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from redline.step import Action, StopConditions, train
from redline.step.train_step import StepOutcome


def actions_of(steps: int, stop: StopConditions, evaluate_every: int | None = None) -> tuple[str, list[str]]:
    """Why a run of at most `steps` steps ended, and what it did after each: "evaluate 2", "save 2", ..."""
    state: Any = SimpleNamespace(iteration=0)
    done: list[str] = []

    def step(microbatches: Any) -> Any:
        state.iteration += 1
        return StepOutcome(0.0, 0.0, 1, 1, (0, 0), 0.0, None)  # type: ignore[arg-type]

    def note(name: str) -> Any:
        return lambda outcome: done.append(f"{name} {state.iteration}")

    actions = [
        Action("record", 1, note("record")),
        Action("evaluate", evaluate_every, note("evaluate"), at_finish=True),
        Action("save", None, note("save"), at_end=True),
    ]
    return train(state, step, [[]] * steps, actions, stop, steps), done


def test_a_run_that_finishes_evaluates_and_saves() -> None:
    reason, done = actions_of(2, StopConditions())
    assert (reason, done) == ("finished", ["record 1", "record 2", "evaluate 2", "save 2"])


@pytest.mark.parametrize("stop", [StopConditions(signal_name="SIGTERM"), StopConditions(exit_interval=1)])
def test_a_run_that_is_stopped_saves_and_evaluates_only_what_was_due(stop: StopConditions) -> None:
    """Whoever stops it may kill it before an evaluation ends: that comes last."""
    assert actions_of(2, stop)[1] == ["record 1", "save 1"]
    assert actions_of(2, stop, evaluate_every=1)[1] == ["record 1", "save 1", "evaluate 1"]


def test_what_is_due_of_both_keeps_its_order_while_the_run_goes_on() -> None:
    _, done = actions_of(2, StopConditions(), evaluate_every=1)
    assert done == ["record 1", "evaluate 1", "record 2", "evaluate 2", "save 2"]
