"""A run from its options to its summary, in order."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from redline.build import compile_failure_explained
from redline.checkpoint import AsyncWriter
from redline.comm import close_world, from_first, largest, together
from redline.comm.transport import DistError, is_transport
from redline.config import Parsed, RunConfig, read_environment, to_toml
from redline.errors import RedlineError, TrainingError, first_line
from redline.files import os_errors_as, write_text_atomic
from redline.ledger import Ledger, open_ledger, read_summary, write_summary
from redline.run.actions import RunActions
from redline.run.display import Display, say
from redline.run.folder import RunFolder, check_folder, check_unused, goes_on, name_run, open_folder
from redline.run.memory import count_saved, memory_history, out_of_memory_explained
from redline.run.opening import OpenRun, open_run
from redline.run.profiling import Profiling
from redline.run.restart import restarted
from redline.run.resume import require_same_start
from redline.run.sinks import open_sinks
from redline.run.summary import summarize, tensorboard_folder
from redline.step import SignalWatch, StopConditions, train

STDERR = 2
ECHO_S = 1.0  # a launcher that is interrupted passes the signal on to processes that had it already


def run(parsed: Parsed, started: float | None = None) -> dict[str, Any] | None:
    """Train as the options say; returns the summary (the content of summary.json), None on all but one rank.

    Args:
        started: what time.perf_counter said when the command began, before PyTorch was loaded; unset: now.

    Raises: RedlineError for whatever cannot be obeyed or stops the run.
    """
    started = time.perf_counter() if started is None else started
    environment = read_environment()
    root = None if parsed.config.checkpoint.save is None else Path(parsed.config.checkpoint.save)
    if root is not None and environment.rank == 0:  # before a checkpoint of it is found: a better one comes
        check_unused(root)
    parsed = restarted(parsed, environment)
    if root is not None and environment.rank == 0:  # before a load, which may take minutes
        check_folder(root, goes_on=goes_on(parsed.config.checkpoint))
    try:
        with compile_failure_explained():
            return train_opened(open_run(parsed, environment, say), started)
    finally:
        close_world()


def train_opened(run: OpenRun, started: float) -> dict[str, Any] | None:
    """Step to the end, with everything written to the run folder."""
    with run.watchdog, _failure_told(run), _entered(run) as folder:
        leads = run.groups.rank == 0
        total = run.plan.batch.total_iterations
        done = run.state.iteration >= total and from_first(run.groups.control, folder.summary.exists)
        if leads:
            say(f"run folder: {folder.root}")
        if not done:
            with out_of_memory_explained(run.config, run.plan, run.hardware, run.local_ranks):
                summary = _train_in(folder, run, started)
            with run.progress.patiently("waiting for the other ranks to end"):
                together(run.groups.control, lambda: None)
            return summary
        if not leads:
            return None
        say(f"nothing is left to train: all {total} steps are done; give more with --train-iters.")
        return _summary_of_old(folder.summary)


@contextmanager
def _failure_told(run: OpenRun) -> Iterator[None]:
    """A rank that fails says so to the others; one that cannot go on says which rank is behind it."""
    if run.groups.world.size == 1:
        yield
        return
    try:
        yield
    except KeyboardInterrupt as told:  # by the launcher, perhaps because it has lost a rank
        if found := run.watchdog.lost():
            raise found from told
        raise
    except Exception as error:
        if _of_sending(error):
            raise run.watchdog.explain(error) from error
        _report(run, error)
        raise


def _report(run: OpenRun, error: BaseException) -> None:
    """Tell the other ranks of an error that began on this one, if it is one: they do not know of it yet."""
    if isinstance(error, Exception) and not _is_known(error) and not _of_sending(error):
        run.watchdog.report(error)


def _is_known(error: BaseException) -> bool:
    """Whether all ranks raise this one."""
    return isinstance(error, RedlineError) and error.everywhere


def _of_sending(error: BaseException) -> bool:
    """Whether another rank is behind an error."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and is_transport(error))


@contextmanager
def _entered(run: OpenRun) -> Iterator[RunFolder]:
    """The run folder, which the first rank makes and holds."""
    options = run.config.checkpoint
    with ExitStack() as held:

        def enter() -> RunFolder:
            folder = held.enter_context(open_folder(_root(run.config), goes_on=goes_on(options)))
            if goes_on(options):  # nobody else could be kept out while this one opened
                require_same_start(options, run.start)
            return folder

        yield from_first(run.groups.control, enter)


def _train_in(folder: RunFolder, run: OpenRun, started: float) -> dict[str, Any] | None:
    config, state, leads = run.config, run.state, run.groups.rank == 0
    stop = StopConditions(
        config.train.exit_interval,
        config.train.exit_duration_in_mins,
        agree=partial(largest, run.groups.control),
        started=started,
    )
    step, batches = run.make_step(), run.batches()
    saved = count_saved(step, run.config) if leads else None
    total = run.plan.batch.total_iterations
    with (
        _ledger(folder, run) if leads else nullcontext() as ledger,
        _writer(run) as writer,
        Display(
            total,
            state.iteration,
            log_interval=config.logging.log_interval,
            throughput=config.logging.log_throughput,
            shown=leads,
        ) as display,
        SignalWatch(
            stop,
            enabled=config.train.exit_signal_handler,
            tell=_tell_at_once if leads else _tell_nobody,
            echo_s=ECHO_S if run.groups.world.size > 1 else 0.0,
        ),
        _collector(manual=config.train.manual_gc),
        memory_history(config.logging, run.device, run.groups.rank),
        closing(batches),
    ):
        together(run.groups.control, lambda: _begin_files(folder, config) if leads else None)
        profiling = Profiling(run, folder, step, ledger)
        actions = RunActions(run, folder, ledger, display, writer, profiling)
        outcome = train(state, step, batches, actions.in_order(), stop, total, profiling.wanted)
        state.optimizer.settle()
        test = actions.evaluate("test") if state.iteration >= total else None
    if ledger is None:
        return None
    profiling.finish()
    summary = summarize(
        run,
        folder,
        ledger,
        flops=actions.flops(),
        outcome=outcome,
        wall_time_s=time.perf_counter() - started,
        test=test,
        account=profiling.account,
        fp8=actions.fp8,
        saved=saved,
        ranks=None if actions.straggler is None else actions.straggler.whole,
    )
    write_summary(folder.summary, summary)
    return summary.as_dict()


@contextmanager
def _writer(run: OpenRun) -> Iterator[AsyncWriter | None]:
    """The writer of `--async-save`. Its last checkpoint takes as long as any, and an error is told first."""
    if not run.config.checkpoint.async_save:
        yield None
        return
    writer = AsyncWriter(run.groups.saving.handle)
    run.watchdog.saving = lambda: writer.busy

    def leave(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            _report(run, error)
        if isinstance(error, Exception) and writer.busy and (run.groups.rank == 0 or not _is_known(error)):
            say(f"{first_line(error).rstrip('.')}: the run ends once the checkpoint under way is written.")
        with run.progress.patiently("finishing the last checkpoint"):
            writer.__exit__(kind, error, trace)

    with ExitStack() as held:
        held.push(leave)
        yield writer


def _ledger(folder: RunFolder, run: OpenRun) -> Ledger:
    config, state = run.config, run.state
    return open_ledger(
        folder.root,
        resumed_step=state.iteration if run.resumes or goes_on(config.checkpoint) else None,
        tensorboard_dir=Path(tensorboard_folder(run, folder)),
        tensorboard_interval=config.logging.tensorboard_log_interval,
        sinks=open_sinks(config, folder),
    )


def _summary_of_old(path: Path) -> dict[str, Any]:
    """What the run wrote when it ended."""
    try:
        return read_summary(path)
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{path} cannot be read: {error}.",
            why="all steps are done, and what they came to stands only there.",
            mend="remove the file: the same command then writes another; speeds are in metrics.jsonl.",
        ) from error


def _begin_files(folder: RunFolder, config: RunConfig) -> None:
    """The configuration of now; the summary of what ended earlier is none of a run that goes on."""
    with os_errors_as(TrainingError, folder.config, "write"):
        write_text_atomic(folder.config, to_toml(config))
    with os_errors_as(TrainingError, folder.summary, "remove"):
        folder.summary.unlink(missing_ok=True)


def _tell_nobody(signal_name: str) -> None:
    """What a rank but the first says of a signal."""


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
