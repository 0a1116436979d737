"""What may take long at the end of a run or a window is waited for: the watchdog of no rank ends the job."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.checkpoint import find_latest, writer
from redline.comm import Watchdog
from redline.config import Environment
from redline.data import Microbatch, Source
from redline.errors import RedlineError, TrainingError
from redline.run import open_run, profiling, spine, train_opened
from redline.step import train_step

from .ranks import fork_ranks
from .tiny import parsed

LIMIT_S = 2.0
VALUES = {
    "fp64": True, "micro_batch_size": 1, "train_iters": 6, "save_interval": 2, "eval_iters": 0,
    "hang_timeout_seconds": LIMIT_S, "startup_timeout_minutes": 1.0,
}  # fmt: skip
AFTER_STEP_4 = 16  # samples consumed by then

Released = Callable[[Watchdog], bool]


def long_past_the_limit(watchdog: Watchdog) -> bool:
    """Whether the other rank's watchdog has seen as much, too."""
    return time.monotonic() - watchdog._progress.since > LIMIT_S + 1.5


def told_of_a_failure(watchdog: Watchdog) -> bool:
    return watchdog._told is not None


def until(released: Released) -> threading.Event:
    """Set once this rank's watchdog has looked, has ended nothing, and `released` holds."""
    look, event = Watchdog._look, threading.Event()

    def looked(watchdog: Watchdog) -> TrainingError | None:
        found = look(watchdog)
        if found is None and released(watchdog):
            event.set()
        return found

    Watchdog._look = looked  # type: ignore[method-assign]
    return event


def slow(owner: Any, name: str, event: threading.Event, which: Callable[..., bool]) -> None:
    """Calls that `which` names begin once the event is set; they say so."""
    before = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if which(*args):
            assert event.wait(60)
            os.write(2, b"released\n")
        return before(*args, **options)

    setattr(owner, name, call)


def run_on_2_ranks(
    folder: Path, prepare: Callable[[Environment], object], **more: Any
) -> tuple[list[int], list[str]]:
    """Exit codes and last words of a run whose forked ranks are prepared so first."""

    def work(environment: Environment) -> None:
        prepare(environment)
        spine.say = lambda text: os.write(2, f"{text}\n".encode())  # type: ignore[assignment]
        try:
            values = parsed({**VALUES, **more, "save": str(folder)})
            train_opened(open_run(values, environment, lambda _: None), time.perf_counter())
        except RedlineError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(error.exit_code)

    return fork_ranks(2, work)


def commit_of(iteration: int, released: Released) -> Callable[[Environment], None]:
    def prepare(environment: Environment) -> None:
        if environment.rank == 0:
            slow(writer, "commit", until(released), lambda _, number, *rest: number == iteration)

    return prepare


def newest(folder: Path) -> str:
    found = find_latest(folder / "checkpoints", verify=True).folder
    assert found is not None
    return found.name


def test_a_last_checkpoint_that_takes_longer_than_the_limit_is_written(tmp_path: Path) -> None:
    codes, said = run_on_2_ranks(tmp_path / "run", commit_of(6, long_past_the_limit))
    assert codes == [0, 0] and "released" in said[0], said
    assert newest(tmp_path / "run") == "iter_0000006"


def test_an_error_is_told_before_the_checkpoint_under_way_is_waited_for(tmp_path: Path) -> None:
    """Loss is NaN on all ranks, soon after a save that is slow: it was lost, and the error never shown."""

    def prepare(environment: Environment) -> None:
        commit_of(4, long_past_the_limit)(environment)
        loss_of, seen = train_step.microbatch_loss, [0]

        def loss(*args: Any) -> Tensor:
            seen[0] += 1
            found: Tensor = loss_of(*args)
            return found * torch.nan if seen[0] > AFTER_STEP_4 // 2 else found

        train_step.microbatch_loss = loss

    codes, said = run_on_2_ranks(tmp_path / "run", prepare)
    assert codes == [1, 1], said
    told, written = said[0].split("released\n")
    assert "NaN" in told and "once the checkpoint under way is written" in told, said
    assert "NaN" in written and "another rank" not in said[0] + said[1], said
    assert newest(tmp_path / "run") == "iter_0000004"


def test_ranks_finish_a_checkpoint_before_they_end_for_another_ones_error(tmp_path: Path) -> None:
    """The second rank fails alone, while the first still writes what both have saved."""

    def prepare(environment: Environment) -> None:
        commit_of(4, told_of_a_failure)(environment)
        read = Source.batch

        def batch(source: Source, start: int, count: int) -> Microbatch:
            if environment.rank == 1 and start >= AFTER_STEP_4:
                raise ValueError("a page of the data is torn")
            return read(source, start, count)

        Source.batch = batch  # type: ignore[method-assign]

    codes, said = run_on_2_ranks(tmp_path / "run", prepare)
    assert codes == [1, 1] and "released" in said[0], said
    assert "another rank has failed: rank 1 at step 5" in said[0] and "a page of the data is torn" in said[0]
    assert "Traceback" in said[1] and "another rank" not in said[1], said
    assert newest(tmp_path / "run") == "iter_0000004"


TRACES = {
    "of one rank": {
        "profile": True,
        "use_pytorch_profiler": True,
        "profile_step_start": 2,
        "profile_step_end": 3,
    },
    "of all ranks": {"profile_ledger": True},
}


@pytest.mark.parametrize("case", TRACES)
def test_a_trace_that_takes_longer_than_the_limit_is_kept(case: str, tmp_path: Path) -> None:
    """Whoever takes none waits for the rank that does, in the next step."""

    def prepare(environment: Environment) -> None:
        if environment.rank == 0:
            slow(profiling, "parse_trace", until(long_past_the_limit), lambda *_: True)

    codes, said = run_on_2_ranks(tmp_path / "run", prepare, save_interval=None, **TRACES[case])
    assert codes == [0, 0] and "released" in said[0], said
    assert (tmp_path / "run" / "ledger.json").is_file()
