"""The append-only record of a run: metrics.jsonl, TensorBoard, other sinks, statistics for the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from redline.ledger.metrics import StepRecord, ValidRecord, append_record, finite, open_metrics
from redline.ledger.skew import Skew
from redline.ledger.statistics import WARMUP_STEPS, RunStatistics
from redline.ledger.tensorboard import EventWriter

METRICS_FILE = "metrics.jsonl"
FP8_FILE = "fp8.jsonl"


class Sink(Protocol):
    """A further place that the numbers of a run go to."""

    def add(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Ledger:
    """Where a run's numbers go. A context manager; made by `open_ledger`.

    Attributes:
        statistics: of the steps recorded by this process.
        last_valid: the latest evaluation of the validation split.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resumed_step: int | None = None,
        tensorboard_dir: Path | None = None,
        tensorboard_interval: int = 1,
        warmup_steps: int = WARMUP_STEPS,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.path = run_dir / METRICS_FILE
        self.statistics = RunStatistics(warmup_steps)
        self.last_valid: ValidRecord | None = None
        self._resumed_step = resumed_step
        self._sinks = list(sinks)
        self._events: EventWriter | None = None
        self._fp8: FileIO | None = None
        self._interval = tensorboard_interval
        with ExitStack() as opened:
            self._metrics = opened.enter_context(open_metrics(self.path, resumed_step))
            for sink in self._sinks:  # a failure below must not leave them open
                opened.callback(sink.close)
            if tensorboard_dir is not None:
                self._events = EventWriter(tensorboard_dir, resumed_step)
            opened.pop_all()

    def record(self, record: StepRecord) -> None:
        """Append one step.

        Raises: TrainingError when the disk refuses it.
        """
        self.statistics.add(record)
        self._append("train", record.step, record.as_dict())

    def record_valid(self, record: ValidRecord) -> None:
        """Append one evaluation."""
        if record.split == "valid":
            self.last_valid = record
        self._append(record.split, record.step, record.as_dict())

    def record_fp8(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append what the casts to fp8 of a step lost: a line an operand to fp8.jsonl, which begins here.

        Args:
            rows: with the keys site, operand and further numbers, which TensorBoard shows too.
        """
        if self._fp8 is None:
            self._fp8 = open_metrics(self.path.with_name(FP8_FILE), self._resumed_step)
        scalars: dict[str, float] = {}
        for row in rows:
            append_record(self._fp8, finite({"step": step, **row}))
            numbers = {
                name: value for name, value in row.items() if isinstance(value, float) and isfinite(value)
            }
            scalars |= {f"fp8/{name}/{row['site']}.{row['operand']}": each for name, each in numbers.items()}
        self._show(step, scalars)

    def record_ranks(self, skew: Skew) -> None:
        """Append one comparison of the ranks."""
        self._append("ranks", skew.step, skew.as_dict())

    def close(self) -> None:
        """Close the files; recording is then over."""
        with ExitStack() as closing:
            if self._fp8 is not None:
                closing.callback(self._fp8.close)
            for sink in self._sinks:
                closing.callback(sink.close)
            if self._events is not None:
                closing.callback(self._events.close)
            closing.callback(self._metrics.close)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, prefix: str, step: int, record: Mapping[str, Any]) -> None:
        append_record(self._metrics, record)
        shown = self._events is not None and (prefix != "train" or step % self._interval == 0)
        if not shown and not self._sinks:
            return
        scalars = {
            f"{prefix}/{name}": float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and name != "step"
        }
        self._show(step, scalars, events=shown)

    def _show(self, step: int, scalars: Mapping[str, float], *, events: bool = True) -> None:
        if self._events is not None and events:
            self._events.add(step, scalars)
        for sink in self._sinks:
            sink.add(step, scalars)


def open_ledger(
    run_dir: Path,
    *,
    resumed_step: int | None = None,
    tensorboard_dir: Path | None = None,
    tensorboard_interval: int = 1,
    warmup_steps: int = WARMUP_STEPS,
    sinks: Sequence[Sink] = (),
) -> Ledger:
    """Open the record of a run in `run_dir`.

    Args:
        resumed_step: None for a new run; else the step of the checkpoint it goes on from: records of later
            steps are dropped.
        tensorboard_dir: where TensorBoard events go, None for none.
        tensorboard_interval: steps between the training points shown there.
        warmup_steps: left out of the medians.
        sinks: get the same numbers, and are closed with the ledger.

    Raises:
        TrainingError: the folder holds another run's metrics, or cannot be written.
        ConfigError: TensorBoard is wanted and not installed.
    """
    return Ledger(
        run_dir,
        resumed_step=resumed_step,
        tensorboard_dir=tensorboard_dir,
        tensorboard_interval=tensorboard_interval,
        warmup_steps=warmup_steps,
        sinks=sinks,
    )
