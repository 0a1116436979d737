"""metrics.jsonl: one JSON object a line, appended and flushed, readable while the run goes on.

Numbers that are not finite are written as null (JSON has no NaN). A line that a crash cut short is no record.
Resuming from a checkpoint drops what was written after it, so that every step stands in the file once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from redline.errors import TrainingError
from redline.files import os_errors_as, write_atomic

CUT = b"{\0"  # how a line begins that a crash cut short, or of which only the length reached the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one optimizer step did and cost.

    Attributes:
        step: from 1.
        loss: mean over the step's tokens.
        lr: the rate this step used.
        grad_norm: global norm before clipping.
        tokens_per_s: of all devices together.
        step_time_s: wall time of the step, the wait for its data included.
        data_wait_s: that wait.
        memory: bytes in use at the peak of the run so far, on this device.
        consumed_samples: sequences consumed after this step.
        global_batch_size: sequences of this step.
        mfu: model FLOPs over peak, attention at half; None without a peak.
        flops_per_s: model FLOPs per second of one device, attention at half.
        memory_now: bytes in use after the step.
        loss_scale: that the gradients carried.
        skipped: whether the update was left out (overflow, NaN).
        nonfinite: what was NaN or infinite in this step, beyond an overflow that the loss scale explains.
        profiled: whether a profiler watched it, which takes time: it has no part in medians.
        extra: further values by name; each becomes a key of the record.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    step_time_s: float
    memory: int
    consumed_samples: int
    global_batch_size: int
    data_wait_s: float = 0.0
    mfu: float | None = None
    flops_per_s: float | None = None
    memory_now: int | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    nonfinite: str | None = None
    profiled: bool = False
    extra: Mapping[str, float | int | str | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The record as it is written, NaN and Inf as None."""
        return _record("step", asdict(self))


def perplexity(loss: float) -> float:
    """exp(loss), the exponent cut at 20 as in Megatron's log; NaN of NaN."""
    return loss if math.isnan(loss) else math.exp(min(20.0, loss))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRecord:
    """One evaluation after `step` steps: mean loss over `tokens` tokens of `split`, which took `time_s`."""

    step: int
    loss: float
    tokens: int
    time_s: float
    split: str = "valid"
    extra: Mapping[str, float | int | str | None] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Of the mean loss."""
        return perplexity(self.loss)

    def as_dict(self) -> dict[str, Any]:
        """The record as it is written, NaN and Inf as None."""
        return _record("valid", asdict(self) | {"perplexity": self.perplexity})


def _record(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    extra = values.pop("extra")
    record: dict[str, Any] = finite({"kind": kind, **values, **extra})
    return record


def finite(value: Any) -> Any:
    """The same plain value with every NaN and infinity as None, tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def open_metrics(path: Path, resumed_step: int | None = None) -> FileIO:
    """Open the file for appending, unbuffered: a record is with the operating system once it is appended.

    Args:
        resumed_step: None for a new run, whose file must not exist yet; else records of later steps (and a
            line cut short) are removed first, atomically.

    Raises: TrainingError when the file exists already, or cannot be written.
    """
    with os_errors_as(TrainingError, path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None and path.exists():
            write_atomic(path, lambda handle: _copy_records(path, handle, resumed_step))
        return FileIO(path, "x" if resumed_step is None else "a")


def append_record(handle: FileIO, record: Mapping[str, Any]) -> None:
    """Write one line.

    Raises: TrainingError when the disk refuses it.
    """
    line = memoryview(json.dumps(record, allow_nan=False).encode() + b"\n")
    with os_errors_as(TrainingError, Path(str(handle.name)), "write"):
        while line:  # a raw file may take a part only
            line = line[handle.write(line) :]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of the file, in order.

    Raises: OSError; ValueError when it holds what no run writes. Only its last line can be cut short.
    """
    records = []
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, 1):
            record = _whole(line)
            if record is not None:
                records.append(record)
            elif line.endswith(b"\n") or line[:1] not in CUT:
                raise ValueError(f"its line {number} is no record")
    return records


def _whole(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None where it is none, or has no end."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and line.endswith(b"\n") else None


def _copy_records(path: Path, target: BinaryIO, last_step: int) -> None:
    """The records up to a step; a line that is none goes, whatever broke it."""
    with open(path, "rb") as handle:
        for line in handle:
            record = _whole(line)
            if record is not None and record.get("step", 0) <= last_step:
                target.write(line)
