"""Which steps of a run are captured, and what becomes of the captures: traces, ledger.json, lines."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from redline.comm import every, from_first
from redline.config import InvalidConfigError, LoggingConfig, Problem
from redline.errors import TrainingError
from redline.files import os_errors_as, write_atomic
from redline.formulas.buckets import ALIGNMENT
from redline.formulas.flops import flops_per_packed_token
from redline.formulas.params import stored_elements
from redline.formulas.traffic import update_bytes
from redline.ledger import Ledger, Reference, StepAccount, join_ranks, write_account
from redline.ledger.statistics import WARMUP_STEPS
from redline.ledger.take import take_account
from redline.ledger.trace import parse_trace
from redline.run.folder import RunFolder
from redline.run.opening import OpenRun, Say
from redline.run.throughput import explain
from redline.step import TrainStep
from redline.step.profile import Captured, NsightCapture, StepProfiler, TorchCapture, Window

FIRST = WARMUP_STEPS + 2  # the step before it warms the tracer up
STEPS = 2
MANY_MICROBATCHES = 8  # from which one step shows enough
AFTER_STEP = (
    "logging",
    "checkpoint",
    "evaluation",
)  # in a step's account, not in its recorded time
GZIP_LEVEL = 1  # a trace shrinks to a tenth at once; more takes ten times as long


class Profiling:
    """The captures of one run, on one rank.

    Attributes:
        profiler: captures the steps of the run's windows.
        account: the newest account of all ranks, None before the first and on all ranks but the first.
    """

    def __init__(self, run: OpenRun, folder: RunFolder, step: TrainStep, ledger: Ledger | None) -> None:
        self.run, self.folder, self._ledger = run, folder, ledger
        self._step = step
        self.account: StepAccount | None = None
        self._asked = self._asked_for()
        # All ranks keep apart all windows, and then each takes its own: their accounts are taken together.
        accounts = _apart(self._accounts(), self._asked)
        windows = sorted([*accounts, *self._own(self._asked)], key=lambda each: each.first)
        self.profiler = StepProfiler(step, windows)
        self._any = bool(windows)
        self._say_displaced(accounts)

    @property
    def wanted(self) -> StepProfiler | None:
        """For the loop: None in a run that captures nothing, now or when its throughput falls."""
        return self.profiler if self._any or self.run.config.logging.log_throughput else None

    @property
    def busy(self) -> bool:
        """Whether the step that runs now is captured."""
        return self.profiler.busy

    def look_next(self, say: Say) -> None:
        """Capture the next step too, where the run still has one to spare, and say what made it slow."""
        capture = self._capture(alone=False, say=say)
        first = self.run.state.iteration + 1 + capture.warmup
        if first < self.run.plan.batch.total_iterations:
            self.profiler.add(Window(first, first, capture))

    def finish(self) -> None:
        """At the end of the run: say in the account what the median of its other steps was."""
        reached = self.run.state.iteration
        if self._asked is not None and reached < self._asked.first:
            self.run.say(f"{_named(self._asked)}: the run stopped at step {reached}; nothing was profiled.")
        if self.account is None or self._ledger is None:
            return
        step_s = self._ledger.statistics.step_time_s
        step_ms = None if step_s is None else 1e3 * step_s
        took_ms = self.account.wall_ms - sum(map(self.account.loss_ms, AFTER_STEP))
        self.account = replace(
            self.account,
            reference=replace(self.account.reference, step_ms=step_ms),
            overhead=None if step_ms is None else took_ms / step_ms - 1,
        )
        write_account(self.folder.ledger, self.account)

    def _capture(self, *, alone: bool, say: Say | None = None) -> TorchCapture:
        """Of one window. Its end may take as long as a save: on several ranks the watchdog would end it."""
        patiently = partial(self.run.progress.patiently, "keeping a trace")
        return TorchCapture(self.run.device, partial(self._captured, alone=alone, say=say), patiently)

    @property
    def _profiled_ranks(self) -> tuple[int, ...]:
        return self.run.config.logging.profile_ranks or (0,)

    def _own(self, asked: Window | None) -> list[Window]:
        return [] if asked is None or self.run.groups.rank not in self._profiled_ranks else [asked]

    def _asked_for(self) -> Window | None:
        """The window of `--profile`, unless the run goes on behind its start, which is said."""
        options, done = self.run.config.logging, self.run.state.iteration
        if not options.profile:
            return None
        last = min(options.profile_step_end, self.run.plan.batch.total_iterations)
        capture = nsight_capture(options, self.run.device) or self._capture(alone=True)
        window = Window(options.profile_step_start + 1, last, capture)
        if done < window.first:
            return window
        self.run.say(f"{_named(window)}: the run goes on at step {done + 1}; nothing is profiled.")
        return None

    def _accounts(self) -> Iterator[Window]:
        """The windows of `--profile-ledger`."""
        options, state = self.run.config.logging, self.run.state
        if not options.profile_ledger:
            return
        batch = self.run.plan.batch
        count = 1 if batch.num_microbatches(state.consumed_samples) >= MANY_MICROBATCHES else STEPS
        found = ledger_windows(state.iteration, batch.total_iterations, options.ledger_interval, count)
        for first, last in found:
            yield Window(first, last, self._capture(alone=False))

    def _say_displaced(self, accounts: list[Window]) -> None:
        """That the steps of `--profile` leave none to account for, and are themselves not accounted for."""
        wanted, asked = self.run.config.logging.profile_ledger, self._asked
        if not wanted or accounts or asked is None:
            return
        if isinstance(asked.capture, NsightCapture) or 0 not in self._profiled_ranks:
            self.run.say(
                f"{_named(asked)}: --profile-ledger would have profiled steps among or beside them, and now "
                "takes no account."
            )

    def _captured(self, captured: Captured, *, alone: bool, say: Say | None = None) -> None:
        """Keep a trace and take its account, unless `alone` together with all other ranks'."""
        rank, (first, *_, last) = self.run.groups.rank, (captured.steps[0], captured.steps[-1])
        named = str(first) if first == last else f"{first}-{last}"
        path = self.folder.root / f"trace-rank{rank}-step{named}.json.gz"
        with os_errors_as(TrainingError, path, "write"):
            packed = gzip.compress(captured.content, GZIP_LEVEL)
            write_atomic(path, lambda handle: handle.write(packed))
        trace = replace(parse_trace(captured.content, path), rank=rank, source=path.name)
        control = self.run.groups.control
        if alone:
            joined = take_account(trace, self._reference())
        else:  # one reference for all: the first rank alone has measured a peak, and knows the median
            reference = from_first(control, self._reference)
            joined = join_ranks(every(control, lambda: take_account(trace, reference)))
        if rank == 0:
            if say is not None:
                say(explain(joined, self.account))
            self.account = joined
            write_account(self.folder.ledger, joined)

    def _reference(self) -> Reference:
        run = self.run
        flops, precision = run.plan.flops["causal-half"], run.plan.precision
        tokens = run.plan.tokens_per_step(run.state.consumed_samples) / run.groups.world.size
        if self._step.work is not None:  # packed documents have attention of their own lengths
            num_tokens, scores = self._step.work
            flops, tokens = (
                flops_per_packed_token(run.plan.shape, num_tokens, scores),
                num_tokens / run.groups.world.size,
            )
        step_s = None if self._ledger is None else self._ledger.statistics.step_time_s
        dtypes, ranks = run.plan.dtypes, run.plan.data_parallel.rule.ranks
        elements = stored_elements(run.plan.shape, ALIGNMENT, run.plan.grid.tp)
        return Reference(
            device=run.hardware.name,
            kind=run.hardware.kind,
            dtype=precision,
            peak_flops_per_s=run.hardware.peak(precision),
            peak_source=run.hardware.peak_source,
            bandwidth_bytes_per_s=run.hardware.bandwidth_bytes_per_s,
            model_flops=flops.total * tokens,
            attention_flops=flops.attention_core * tokens,
            flops_source="model",
            convention=flops.convention,
            step_ms=None if step_s is None else 1e3 * step_s,
            update_bytes=update_bytes(elements // dtypes.shards, dtypes),
            norm_bytes=dtypes.bytes_each()["main_grads"] * elements / ranks,
        )


def nsight_capture(options: LoggingConfig, device: torch.device) -> NsightCapture | None:
    """What `--profile` means without `--use-pytorch-profiler`; None where that is given, or neither.

    Raises: InvalidConfigError on a CPU.
    """
    if not options.profile or options.use_pytorch_profiler:
        return None
    if device.type != "cuda":
        what = "--profile without --use-pytorch-profiler needs a GPU."
        why = "it marks the window for Nsight Systems, which traces CUDA."
        mend = "add --use-pytorch-profiler."
        raise InvalidConfigError([Problem("nsight-needs-cuda", what, why, mend, ("--profile",))])
    return NsightCapture(ranges=options.nvtx_ranges)


def ledger_windows(
    done: int, total: int, interval: int | None, count: int = STEPS
) -> Iterator[tuple[int, int]]:
    """(first, last) step of each account: after the warm-up, and every `interval` steps from there.

    A short run has what fits; its last step, with the evaluation and checkpoint of the end, only where it is
    the only one.

    Args:
        done, total: steps before this process, and in all.
    """
    left = total - done
    if left <= 0:
        return
    end = max(total - 1, done + 1)
    first = done + min(FIRST, max(1, left - count))
    while first <= end:
        yield first, min(first + count - 1, end)
        if interval is None:
            return
        first += max(interval, count + 1)


def _apart(windows: Iterable[Window], asked: Window | None) -> list[Window]:
    """Those of `windows` (by time) that neither meet an earlier one nor `asked`, their warm-up included."""
    kept: list[Window] = []
    for window in windows:
        others = kept if asked is None else [*kept, asked]
        if not any(_meet(window, other) for other in others):
            kept.append(window)
    return kept


def _meet(one: Window, other: Window) -> bool:
    """Whether the later one would begin to warm up before the earlier one has ended."""
    first, second = sorted((one, other), key=lambda each: each.first)
    return second.first - second.capture.warmup <= first.last


def _named(window: Window) -> str:
    return f"--profile of steps {window.first} to {window.last}"


def ledger_of(account: StepAccount | None) -> dict[str, Any] | None:
    """The waterfall as the summary holds it."""
    if account is None:
        return None
    document = account.as_dict()
    return {name: document[name] for name in document if name not in ("operators", "modules", "ranks")}
