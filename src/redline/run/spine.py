"""A run from its options to its summary, in order."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from redline.checkpoint import AsyncWriter
from redline.config import Parsed, RunConfig, read_environment, to_toml
from redline.errors import TrainingError
from redline.files import os_errors_as, write_text_atomic
from redline.ledger import open_ledger, read_summary, write_summary
from redline.run.actions import RunActions
from redline.run.display import Display, say
from redline.run.folder import RunFolder, check_folder, goes_on, name_run, open_folder
from redline.run.memory import out_of_memory_explained
from redline.run.opening import OpenRun, open_run
from redline.run.summary import summarize, tensorboard_folder
from redline.step import SignalWatch, StopConditions, train

STDERR = 2


def run(parsed: Parsed) -> dict[str, Any]:
    """Train as the options say; returns the summary (the content of summary.json).

    Raises: RedlineError for whatever cannot be obeyed or stops the run.
    """
    started = time.perf_counter()
    options = parsed.config.checkpoint
    if options.save is not None:  # before anything is loaded, which may take minutes
        check_folder(Path(options.save), goes_on=goes_on(options))
    with out_of_memory_explained():
        return train_opened(open_run(parsed, read_environment(), say), started)


def train_opened(run: OpenRun, started: float) -> dict[str, Any]:
    """Step to the end, with everything written to the run folder."""
    with open_folder(_root(run.config), goes_on=goes_on(run.config.checkpoint)) as folder:
        say(f"run folder: {folder.root}")
        total = run.plan.batch.total_iterations
        if run.state.iteration >= total and folder.summary.exists():
            say(f"nothing is left to train: all {total} steps are done; give more with --train-iters.")
            return read_summary(folder.summary)
        return _train_in(folder, run, started)


def _train_in(folder: RunFolder, run: OpenRun, started: float) -> dict[str, Any]:
    config, state = run.config, run.state
    stop = StopConditions(config.train.exit_interval, config.train.exit_duration_in_mins)
    step, batches = run.make_step(), run.batches()
    total = run.plan.batch.total_iterations
    with (
        open_ledger(
            folder.root,
            resumed_step=state.iteration if run.resumes or goes_on(config.checkpoint) else None,
            tensorboard_dir=Path(tensorboard_folder(run, folder)),
            tensorboard_interval=config.logging.tensorboard_log_interval,
        ) as ledger,
        AsyncWriter() if config.checkpoint.async_save else nullcontext() as writer,
        Display(
            total,
            state.iteration,
            log_interval=config.logging.log_interval,
            throughput=config.logging.log_throughput,
        ) as display,
        SignalWatch(stop, enabled=config.train.exit_signal_handler, tell=_tell_at_once),
        _collector(manual=config.train.manual_gc),
        closing(batches),
    ):
        with os_errors_as(TrainingError, folder.config, "write"):
            write_text_atomic(folder.config, to_toml(config))
        actions = RunActions(run, folder, ledger, display, writer)
        outcome = train(state, step, batches, actions.in_order(), stop, total)
        test = actions.evaluate("test") if state.iteration >= total else None
    summary = summarize(
        run, folder, ledger, outcome=outcome, wall_time_s=time.perf_counter() - started, test=test
    )
    write_summary(folder.summary, summary)
    return summary.as_dict()


def _tell_at_once(signal_name: str) -> None:
    """From inside a signal handler, where printing is not safe."""
    line = f"{signal_name}: finishing the step, then saving; a second one ends the process at once.\n"
    with suppress(OSError):
        os.write(STDERR, line.encode())


def _root(config: RunConfig) -> Path:
    if config.checkpoint.save is not None:
        return Path(config.checkpoint.save)
    return name_run(config.model.preset or "run")


@contextmanager
def _collector(*, manual: bool) -> Iterator[None]:
    """With --manual-gc, Python collects garbage only when the run asks for it."""
    if not manual or not gc.isenabled():
        yield
        return
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        gc.enable()
