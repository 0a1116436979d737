"""A run from its options to its summary, in order."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from redline.checkpoint import AsyncWriter
from redline.config import Parsed, RunConfig, read_environment, to_toml
from redline.errors import TrainingError
from redline.files import os_errors_as, write_text_atomic
from redline.ledger import open_ledger, write_summary
from redline.run.actions import RunActions
from redline.run.display import Display
from redline.run.folder import RunFolder, name_run, open_folder
from redline.run.memory import out_of_memory_explained
from redline.run.opening import OpenRun, open_run
from redline.run.summary import summarize, tensorboard_folder
from redline.step import SignalWatch, StopConditions, train


def run(parsed: Parsed) -> dict[str, Any]:
    """Train as the options say; returns the summary (the content of summary.json).

    Raises: RedlineError for whatever cannot be obeyed or stops the run.
    """
    started = time.perf_counter()
    with out_of_memory_explained():
        return train_opened(open_run(parsed, read_environment(), print), started)


def train_opened(run: OpenRun, started: float) -> dict[str, Any]:
    """Step to the end, with everything written to the run folder."""
    config, state = run.config, run.state
    folder = open_folder(_root(config), resumes=run.resumes)
    with os_errors_as(TrainingError, folder.config, "write"):
        write_text_atomic(folder.config, to_toml(config))
    print(f"run folder: {folder.root}", flush=True)

    stop = StopConditions(config.train.exit_interval, config.train.exit_duration_in_mins)
    step, batches = run.make_step(), run.batches()
    total = run.plan.batch.total_iterations
    with (
        open_ledger(
            folder.root,
            resumed_step=state.iteration if run.resumes else None,
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
        SignalWatch(stop, enabled=config.train.exit_signal_handler),
        _collector(manual=config.train.manual_gc),
        closing(batches),
    ):
        actions = RunActions(run, folder, ledger, display, writer)
        outcome = train(state, step, batches, actions.in_order(), stop, total)
        test = actions.evaluate("test") if state.iteration >= total else None
    summary = summarize(
        run, folder, ledger, outcome=outcome, wall_time_s=time.perf_counter() - started, test=test
    )
    write_summary(folder.summary, summary)
    return summary.as_dict()


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
