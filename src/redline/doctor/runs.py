"""A finished or running job, from its folder: summary.json and metrics.jsonl in few numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from redline.errors import DataError
from redline.ledger import LEDGER_FILE, METRICS_FILE, Loss, read_account, read_metrics, read_summary

WARM_UP = 3  # steps left out of every median
SLOW = 1.3  # times the median step, from which a step counts as slow


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run did.

    Attributes:
        steps: recorded ones; step_s and mfu are medians without warm-up.
        slow_steps: numbers of steps far above the median; lost_share is the time they lost.
        slow_period: their distance, where it is regular.
        gpu: the device's name; ranks is how many trained together.
        parameters: of the model, its vocabulary at its true size.
        choices: what ran in place of every `auto`.
        on_cpu: a CPU has no data sheet; nothing is predicted of it.
        losses: what costs time in the ledger, the largest first; none where no step was profiled. ledger_mfu
            is that of the profiled steps.
    """

    steps: int
    step_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    slow_steps: tuple[int, ...] = ()
    slow_period: int | None = None
    lost_share: float = 0.0
    skipped_steps: int = 0
    memory_bytes: int | None = None
    predicted_memory: int | None = None
    gpu: str | None = None
    ranks: int | None = None
    parameters: int | None = None
    outcome: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    on_cpu: bool = False
    losses: tuple[Loss, ...] = ()
    ledger_mfu: float | None = None

    def lost(self, loss: Loss) -> float:
        """The part of everything lost that one cause holds."""
        whole = sum(each.share for each in self.losses if each.share > 0)
        return loss.share / whole if whole else 0.0


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder.

    Raises: DataError when there are no metrics to read, or a file that is there cannot be read.
    """
    try:
        records = [each for each in read_metrics(folder / METRICS_FILE) if each.get("kind") == "step"]
    except FileNotFoundError as exc:
        raise DataError(
            f"{folder} is not a run's folder: it holds no {METRICS_FILE}.",
            why="a run leaves metrics.jsonl, config.toml and summary.json there.",
            mend="name the folder that --save named, or a launch script.",
        ) from exc
    except (OSError, ValueError) as exc:
        raise _unreadable(folder / METRICS_FILE, exc) from exc
    summary = _summary(folder / "summary.json")
    ledger = folder / LEDGER_FILE
    if not ledger.exists():
        return record_of(records, summary)
    account = read_account(ledger)
    losses = sorted((loss for loss in account.losses if loss.share > 0), key=lambda loss: -loss.share)
    return replace(record_of(records, summary), losses=tuple(losses), ledger_mfu=account.mfu)


def _summary(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        return read_summary(path)
    except (OSError, ValueError) as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, reason: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read: {reason}.",
        why="what a run did is taken from it as it was written.",
        mend="restore the file, or name another run.",
    )


def record_of(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> RunRecord:
    """The same from plain values."""
    settled = [
        each
        for each in records[WARM_UP:]
        if isinstance(each.get("step_time_s"), int | float) and not each.get("profiled")
    ]
    times = [float(each["step_time_s"]) for each in settled]
    median = statistics.median(times) if times else None
    slow = tuple(int(each["step"]) for each in settled if median and each["step_time_s"] > SLOW * median)
    lost = sum(time - median for time in times if median and time > SLOW * median) if median else 0.0
    measured = summary.get("measured_memory_bytes") or max(
        (each.get("memory") or 0 for each in records), default=0
    )
    utilisation = (summary.get("mfu") or {}).get("causal-half") or {}
    shares = [each["mfu"] for each in settled if isinstance(each.get("mfu"), int | float)]
    rates = [each["tokens_per_s"] for each in settled if isinstance(each.get("tokens_per_s"), int | float)]
    return RunRecord(
        steps=len(records),
        step_s=median,
        tokens_per_s=statistics.median(rates) if rates else None,
        mfu=statistics.median(shares) if shares else utilisation.get("mfu"),
        slow_steps=slow,
        slow_period=_period(slow),
        lost_share=lost / sum(times) if times else 0.0,
        skipped_steps=sum(bool(each.get("skipped")) for each in records),
        memory_bytes=measured or None,
        predicted_memory=(summary.get("predicted_memory") or {}).get("total"),
        gpu=(summary.get("hardware") or {}).get("name"),
        ranks=_whole(summary.get("world_size")),
        parameters=_whole(summary.get("parameters")),
        outcome=str(summary.get("outcome") or ""),
        choices={str(each["what"]): str(each["ran"]) for each in summary.get("choices") or ()},
        on_cpu=(summary.get("hardware") or {}).get("kind") == "cpu",
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _period(steps: Sequence[int]) -> int | None:
    """The distance most of these steps have from the next; None when there is no such."""
    distances = Counter(later - earlier for earlier, later in pairwise(steps))
    if not distances or len(steps) < 3:
        return None
    distance, times = distances.most_common(1)[0]
    return distance if distance > 1 and times >= 0.7 * (len(steps) - 1) else None
