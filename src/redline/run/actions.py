"""What happens after a step: record it, evaluate, save, collect garbage."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path

from redline.checkpoint import AsyncWriter, save_checkpoint
from redline.comm import from_first
from redline.data import Source
from redline.errors import TrainingError
from redline.files import os_errors_as
from redline.formulas.flops import CONVENTIONS, Attended, Convention, TokenFlops, flops_per_packed_token
from redline.ledger import Ledger, StepRecord, ValidRecord, mfu
from redline.model import Fp8Gemms
from redline.run.batches import eval_batches, mark_data
from redline.run.display import Display
from redline.run.folder import RunFolder
from redline.run.fp8 import Fp8Watch
from redline.run.opening import OpenRun
from redline.run.profiling import Profiling
from redline.run.resume import checkpoint_values
from redline.run.straggler import StragglerWatch
from redline.run.throughput import ThroughputWatch
from redline.step import Action, StepOutcome, evaluate
from redline.units import format_duration

PROGRESS_FILE = "progress.txt"


class RunActions:
    """The periodic actions of one run, the same on every rank; the first one alone records and shows.

    Args:
        ledger: None on all ranks but the first.

    Attributes:
        saved: the folder of the newest checkpoint, None before the first.
        fp8: reads the scaling state; None without one, and on all ranks but the first.
        straggler: compares the ranks, where that was asked for.
    """

    def __init__(
        self,
        run: OpenRun,
        folder: RunFolder,
        ledger: Ledger | None,
        display: Display,
        writer: AsyncWriter | None,
        profiling: Profiling,
    ) -> None:
        self.run, self.folder, self.ledger, self.display = run, folder, ledger, display
        self._profiling = profiling
        options = run.config.logging
        self._watch = ThroughputWatch(options.throughput_drop) if options.log_throughput else None
        fp8 = run.state.fp8
        self.fp8 = Fp8Watch(fp8) if isinstance(fp8, Fp8Gemms) and ledger is not None else None
        self.straggler = StragglerWatch(run.groups.control) if options.log_straggler else None
        self.saved: Path | None = None
        self._writer = writer
        self._num_samples = self._num_tokens = 0  # of the steps so far
        self._attended = Attended(0, 0)

    def in_order(self) -> list[Action]:
        """The actions, in the order in which they run after a step."""
        train, checkpoint = self.run.config.train, self.run.config.checkpoint
        evaluates, every = self.run.splits.valid is not None, self.run.config.precision.fp8_stats_interval
        actions = [Action("record", 1, self.record)]
        rollback = self.run.rollback
        if rollback is not None and self.ledger is not None:
            actions.insert(0, Action("go back", 1, lambda _: rollback.settle()))  # before any save
        if self._watch is not None:
            interval = self.run.config.logging.log_interval
            actions.append(Action("throughput", interval, lambda _: self.watch()))
        if self.fp8 is not None and every is not None:
            actions.append(Action("fp8 table", every, lambda _: self.fp8_table()))
        if self.straggler is not None:
            interval = self.run.config.logging.log_interval
            actions.append(Action("ranks", interval, lambda _: self.compare_ranks(), at_end=True))
        if evaluates:
            actions.append(
                Action("evaluate", train.eval_interval, lambda _: self.evaluate("valid"), at_finish=True)
            )
        actions.append(Action("save", checkpoint.save_interval, lambda _: self.save(), at_end=True))
        if train.manual_gc:
            actions.append(Action("gc", train.manual_gc_interval, lambda _: _collect()))
        return actions

    def record(self, outcome: StepOutcome) -> None:
        """Append the step to the ledger and show it."""
        record = self._record(outcome)
        if self.straggler is not None:
            self.straggler.add(outcome, profiled=record.profiled)
        if self.ledger is None:
            return
        self.ledger.record(record)
        if self._watch is not None:
            self._watch.add(record)
        self.display.step(record)
        result = outcome.result
        if not result.applied:
            cause = f"overflow under the loss scale {result.loss_scale:g}: " if result.overflow else ""
            self.display.message(f"step {record.step} skipped: {cause}{result.nonfinite}")

    def fp8_table(self) -> None:
        """Record what the casts to fp8 of this step lost."""
        assert self.fp8 is not None and self.ledger is not None
        self.fp8.record(self.run.state.iteration, self.ledger)

    def watch(self) -> None:
        """Say when throughput has fallen, and have all ranks capture the next step for the cause."""

        def look() -> str | None:
            assert self._watch is not None and self.ledger is not None
            return self._watch.look(self.run.state.iteration, self.ledger.statistics)

        warning = from_first(self.run.groups.control, look)
        if warning is not None:
            self.display.message(warning)
            self._profiling.look_next(self.display.message)

    def compare_ranks(self) -> None:
        """Name the slowest rank since the last comparison."""
        assert self.straggler is not None
        options, world = self.run.config.logging, self.run.groups.world
        self.run.progress.begins("comparing the ranks")
        skew = self.straggler.look(self.run.state.iteration)
        if skew is None or self.ledger is None:
            return
        self.ledger.record_ranks(skew)
        if world.size > 1:
            self.display.message(skew.words(min(options.straggler_minmax_count, world.size)))

    def _record(self, outcome: StepOutcome) -> StepRecord:
        run, state, result = self.run, self.run.state, outcome.result
        time_s = outcome.wait_s + outcome.time_s
        tokens_per_s = outcome.num_tokens / time_s
        self._num_samples += outcome.num_samples
        self._num_tokens += outcome.num_tokens
        self._attended = Attended(*map(sum, zip(self._attended, outcome.attended, strict=True)))
        flops = flops_per_packed_token(run.plan.shape, outcome.num_tokens, outcome.attended)
        reached = mfu(flops, tokens_per_s / run.groups.world.size, run.hardware, run.plan.precision)
        extra: dict[str, float | int | str | None] = {}
        if outcome.z_loss is not None:
            extra["z_loss"] = outcome.z_loss
        if run.config.data.packing:
            places = outcome.num_samples * run.plan.seq_length
            extra["token_efficiency"] = outcome.num_tokens / places
        if run.config.logging.log_params_norm:
            extra["params_norm"] = state.optimizer.params_norm()
        looks = state.iteration % run.config.logging.log_interval == 0
        if self.fp8 is not None and self.fp8.saturates and looks:
            extra["fp8_overshoot"], warning = self.fp8.overshoot()
            if warning is not None:
                self.display.message(f"step {state.iteration}: {warning}")
        if self.fp8 is not None and self.fp8.returns:
            extra["fp8_returned"] = self.fp8.returned
        if result.num_zeros is not None:
            extra["num_zeros"] = result.num_zeros
        return StepRecord(
            step=state.iteration,
            loss=outcome.loss,
            lr=outcome.lr,
            grad_norm=result.grad_norm,
            tokens_per_s=tokens_per_s,
            step_time_s=time_s,
            data_wait_s=outcome.wait_s,
            memory=run.meter.peak_bytes(),
            memory_now=run.meter.now_bytes(),
            consumed_samples=state.consumed_samples,
            global_batch_size=outcome.num_samples,
            mfu=reached.value,
            flops_per_s=reached.flops_per_s,
            loss_scale=result.loss_scale,
            skipped=not result.applied,
            nonfinite=None if result.nonfinite is None or result.overflow else str(result.nonfinite),
            profiled=self._profiling.busy,
            extra=extra,
        )

    def evaluate(self, split: str) -> ValidRecord | None:
        """Evaluate a split on its fixed samples; None where the run has no such split."""
        run = self.run
        source = run.splits.valid if split == "valid" else run.splits.test
        if source is None:
            return None
        with run.progress.patiently("an evaluation"):
            return self._evaluate(split, source)

    def _evaluate(self, split: str, source: Source) -> ValidRecord:
        run, started = self.run, time.perf_counter()
        batches = eval_batches(
            source,
            run.plan.evaluation.samples,
            run.config.train.micro_batch_size,
            num_workers=run.config.data.num_workers,
            dp=run.groups.dp.size,
            dp_rank=run.groups.dp.index,
        )
        found = evaluate(run.state.model, batches, run.device, run.groups.dp, run.state.fp8)
        record = ValidRecord(
            step=run.state.iteration,
            loss=found.loss,
            tokens=found.num_tokens,
            time_s=time.perf_counter() - started,
            split=split,
        )
        if self.ledger is not None:
            self.ledger.record_valid(record)
            self.display.valid(record)
        return record

    def save(self) -> None:
        """Write a checkpoint, in the background where that was asked for."""
        with self.run.progress.patiently("saving a checkpoint"):
            self._save()

    def _save(self) -> None:
        run, state, options = self.run, self.run.state, self.run.config.checkpoint
        seen = mark_data(run.splits.train, state.consumed_samples)
        report = save_checkpoint(
            self.folder.checkpoints,
            state.iteration,
            state.tensors(moments=options.save_optim),
            checkpoint_values(run.config, run.plan, run.schedules, state, seen),
            keep=options.keep_checkpoints,
            writer=self._writer,
            group=run.groups.control.handle,
            waits=run.progress.meets,
            tell=lambda lost: self.display.message(f"step {state.iteration}: {lost}"),
        )
        self.saved = report.folder
        if self.ledger is None:
            return
        if report.waited_s > 1:
            self.display.message(
                f"step {state.iteration}: waited {format_duration(report.waited_s)} for the last checkpoint."
            )
        if run.config.logging.log_progress:
            self._log_progress()

    def flops(self) -> Mapping[Convention, TokenFlops]:
        """Model FLOPs of the mean token of the steps so far, in each convention."""
        if not self._num_tokens:
            return self.run.plan.flops
        shape, work = self.run.plan.shape, (self._num_tokens, self._attended)
        return {name: flops_per_packed_token(shape, *work, name) for name in CONVENTIONS}

    def _log_progress(self) -> None:
        state, path = self.run.state, self.folder.root / PROGRESS_FILE
        # Masked tokens cost FLOPs too, so FLOPs follow the samples.
        tokens = state.consumed_samples * self._num_tokens / max(self._num_samples, 1)
        flops = self.flops()["causal-half"].total * tokens
        line = (
            f"iteration {state.iteration}\tsamples {state.consumed_samples}\t"
            f"tokens {state.consumed_tokens}\tFLOPs {flops:.4g}\n"
        )
        with os_errors_as(TrainingError, path, "write"), open(path, "a", encoding="utf-8") as handle:
            handle.write(line)


def _collect() -> None:
    gc.collect()
