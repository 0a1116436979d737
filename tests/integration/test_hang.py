"""A rank that hangs, dies or fails ends the job within the limit, and is named with step and operation."""

from __future__ import annotations

import ctypes
import os
import pickle
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.checkpoint import find_latest
from redline.config import Environment
from redline.data import Microbatch, Source
from redline.errors import RedlineError
from redline.run import open_run, train_opened
from redline.run.restart import restarted

from .ranks import fork_ranks, on_ranks
from .tiny import parsed

LIMIT_S = 4.0
VALUES = {
    "fp64": True, "micro_batch_size": 1, "train_iters": 6, "save_interval": 1, "async_save": False,
    "hang_timeout_seconds": LIMIT_S, "startup_timeout_minutes": 1.0,
}  # fmt: skip
TP = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 2, "save_interval": None}
GEMMS_TO_STEP_2 = 20  # row GEMMs of tiny: 2 layers, 2 in each, 4 microbatches a step
STEP_3 = 8  # samples consumed by the two steps before


def sleep() -> None:
    time.sleep(600)


def die() -> None:
    time.sleep(2)  # where a rank stands is told twice a second
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("a page of the data is torn")


def wait_in_a_library() -> None:
    """Told to end soon after, and as unable to as a process that waits for a GPU: no Python runs any more."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def misbehaving(
    folder: Path, at_step_3: Callable[[], None], first: Callable[[], None] | None = None, **more: Any
) -> Callable[[Environment], Any]:
    """A run whose second rank does that when it prepares step 3, and perhaps the first one something else."""

    def work(environment: Environment) -> Any:
        read = Source.batch
        does = (first, at_step_3)[environment.rank]

        def batch(source: Source, start: int, count: int) -> Microbatch:
            if does is not None and start >= STEP_3:
                does()
            return read(source, start, count)

        Source.batch = batch  # type: ignore[method-assign]
        try:
            record = {"flight_recorder_dump_path": str(folder.parent / "record")}
            values = parsed({**VALUES, **record, **more, "save": str(folder)})
            train_opened(open_run(values, environment, lambda _: None), 0.0)
        except RedlineError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(error.exit_code)

    return work


def ends(
    folder: Path,
    at_step_3: Callable[[], None],
    within_s: float,
    first: Callable[[], None] | None = None,
    **more: Any,
) -> tuple[list[int], list[str]]:
    """Exit codes and last words of two ranks, after which the checkpoint of step 2 is whole."""
    started = time.monotonic()
    codes, said = fork_ranks(2, misbehaving(folder, at_step_3, first, **more))
    assert time.monotonic() - started < within_s
    found = find_latest(folder / "checkpoints", verify=True).folder
    assert found is not None and found.name == "iter_0000002"
    return codes, said


def test_b117_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    """And each rank leaves its newest collectives behind: the one that waits is one ahead."""
    codes, said = ends(tmp_path / "run", sleep, within_s=LIMIT_S + 40)
    assert codes == [1, 1]
    for words in said:
        assert "rank 1 at step 3, preparing data" in words, said
    waiting, hung = (pickle.loads((tmp_path / f"record{rank}").read_bytes()) for rank in range(2))
    assert len(waiting["entries"]) == len(hung["entries"]) + 1
    assert waiting["entries"][-1]["profiling_name"] == "gloo:all_reduce"


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    codes, said = ends(tmp_path / "run", die, within_s=LIMIT_S + 40)
    assert codes == [1, -signal.SIGKILL]
    assert "rank 1 at step 3, preparing data, no longer answers" in said[0], said


def test_a_rank_that_dies_is_named_by_one_that_cannot_stop_waiting_for_it(tmp_path: Path) -> None:
    """As over NCCL: the launcher tells the other rank to end, which hears it in the library it waits in."""
    more = {"hang_timeout_seconds": 300.0}
    codes, said = ends(tmp_path / "run", die, within_s=60, first=wait_in_a_library, **more)
    assert codes == [1, -signal.SIGKILL]
    assert "rank 1 at step 3, preparing data, no longer answers" in said[0], said


def test_a_rank_that_fails_is_quoted_and_the_next_attempt_resumes(tmp_path: Path) -> None:
    """The cause, not the closed connection, is what the other rank says; attempt 2 goes on by itself."""
    codes, said = ends(tmp_path / "run", fail, within_s=LIMIT_S + 40)
    assert 0 not in codes
    assert (
        "rank 1 at step 3, preparing data" in said[0] and "ValueError: a page of the data is torn" in said[0]
    ), said

    def again(environment: Environment) -> Any:
        second = replace(environment, attempt=1)
        values = restarted(parsed({**VALUES, "save": str(tmp_path / "run")}), second)
        run = open_run(values, second, lambda _: None)
        begun = run.state.iteration
        train_opened(run, 0.0)
        return begun, run.state.iteration

    assert on_ranks(2, again) == [(2, 6), (2, 6)]


STANDS_STILL = {  # where, the options that lead there, what is said of the rank
    "tp GEMM": (
        ("redline.model.parallel_gemm:RowGemmFn", "forward"),
        TP,
        "rank 1 at step 2, microbatch 1 of 4",
    ),
    "evaluation": (
        ("redline.run.actions", "evaluate"),
        {"eval_iters": 1},
        "rank 1 at step 6, an evaluation, is",
    ),
    "save": (("redline.run.actions", "save_checkpoint"), {}, "rank 1 at step 1, saving a checkpoint, is"),
}


@pytest.mark.parametrize("case", STANDS_STILL)
def test_b117_a_rank_that_hangs_between_collectives_of_any_kind_is_named(case: str, tmp_path: Path) -> None:
    """All others wait for it in one of tp, of an evaluation, of a save; and all say the same of it."""
    place, options, expected = STANDS_STILL[case]
    owner, name = place
    limits = {"hang_timeout_seconds": LIMIT_S, "startup_timeout_minutes": 9 / 60}

    def work(environment: Environment) -> None:
        at, passed = pkgutil.resolve_name(owner), []
        before = getattr(at, name)

        def stands(*args: Any, **kwargs: Any) -> Any:
            passed.append(name)
            if name != "forward" or len(passed) == GEMMS_TO_STEP_2:
                sleep()
            return before(*args, **kwargs)

        if environment.rank == 1:
            setattr(at, name, staticmethod(stands) if name == "forward" else stands)
        try:
            values = parsed({**VALUES, **limits, "save": str(tmp_path / "run"), "eval_iters": 0, **options})
            train_opened(open_run(values, environment, lambda _: None), 0.0)
        except RedlineError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(error.exit_code)

    codes, said = fork_ranks(2, work)
    assert codes == [1, 1]
    for words in said:
        assert "nothing has happened" in words and expected in words, said
        assert "has failed" not in words and words.count("TrainingError") == 1, said


def test_an_attempt_without_a_folder_says_so() -> None:
    with pytest.raises(RedlineError, match="attempt 2 of this run cannot go on"):
        restarted(parsed({}), Environment(attempt=1))


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    read = Source.batch
    yield
    assert Source.batch is read, "only the forked ranks misbehave"
