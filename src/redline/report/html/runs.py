"""A run folder read for the report: what is there, and one line for each part that is not."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.doctor import Diagnosis, RunRecord
from redline.doctor.runs import record_of
from redline.errors import DataError, UsageError
from redline.ledger import (
    FP8_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    StepAccount,
    read_account,
    read_metrics,
    read_summary,
)
from redline.report.html.values import mapping, number, objects

SUMMARY_FILE, CONFIG_FILE, CHECKPOINTS = "summary.json", "config.toml", "checkpoints"
NO_SUMMARY = "No summary.json: the run has not ended, or ended without a word. Medians are of metrics.jsonl."
NO_LEDGER = "No ledger.json: no step of this run was profiled, so nobody knows where its time went."
NO_CONFIG = "No config.toml: the options of this run are not known."
OUT_OF_NAMES = ("checkpoint.save", "logging.tensorboard_dir")  # where a run writes, not what it does


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run folder.

    Attributes:
        label: the folder's name, made unique among the runs of a page.
        steps, valid: records of metrics.jsonl, by step.
        record: medians and totals, as the doctor reads them.
        summary: summary.json; empty when the run has not ended.
        options: "section.name" -> value, of config.toml; empty without one.
        account: ledger.json; None when no step was profiled.
        fp8: records of fp8.jsonl; empty without one.
        checkpoints: steps after which one was written, as far as that can be told.
        diagnosis: the doctor's; None with the reason in `undiagnosed`.
    """

    label: str
    folder: Path
    steps: Sequence[Mapping[str, Any]]
    valid: Sequence[Mapping[str, Any]]
    record: RunRecord
    summary: Mapping[str, Any]
    options: Mapping[str, Any]
    account: StepAccount | None
    checkpoints: tuple[int, ...]
    fp8: Sequence[Mapping[str, Any]] = ()
    diagnosis: Diagnosis | None = None
    undiagnosed: str = ""

    @property
    def missing(self) -> list[str]:
        """A line for each file that is not there."""
        absent = ((self.summary, NO_SUMMARY), (self.account, NO_LEDGER), (self.options, NO_CONFIG))
        return [line for found, line in absent if not found]

    @property
    def device(self) -> str:
        """The name of one of them; "" where nothing says so."""
        return self.record.gpu or ("" if self.account is None else self.account.reference.device)

    @property
    def devices(self) -> int | None:
        """How many devices trained together; None where nothing says so."""
        stated = number(self.summary.get("world_size"))
        if stated:
            return int(stated)
        return len(self.account.ranks) or None if self.account is not None else None


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Every folder, in this order, with labels that tell them apart.

    Raises:
        UsageError: a folder does not exist, is no run's, or is named twice.
        DataError: a file in it cannot be read, or is not what its name says.
    """
    for folder in folders:
        if not folder.is_dir():
            what = f"{folder} is a file." if folder.exists() else f"there is no {folder}."
            raise UsageError(
                what, "a report is made of a run's folder.", "name the folder that --save named."
            )
    places = [folder.resolve() for folder in folders]
    if again := next((folder for folder in places if places.count(folder) > 1), None):
        raise UsageError(
            f"{again} is named twice.", "a run compared with itself says nothing.", "name another."
        )
    return [_read(*each) for each in zip(places, unique_labels(places), strict=True)]


def unique_labels(places: Sequence[Path]) -> list[str]:
    """The shortest ends of these paths that differ from each other."""
    longest = max(len(place.parts) for place in places)
    for length in range(1, longest + 1):
        labels = ["/".join(place.parts[-length:]).replace("//", "/") for place in places]
        if len(set(labels)) == len(labels):
            break
    return labels


def _read(folder: Path, label: str) -> RunData:
    records = _metrics(folder)
    steps = [each for each in records if each.get("kind") == "step"]
    if not steps:
        raise DataError(
            f"{folder / METRICS_FILE} holds no step.",
            why="a report is made of the steps that a run has made.",
            mend="wait for the first step, or name another run.",
        )
    summary = _summary(folder)
    options = _options(folder)
    return RunData(
        label=label,
        folder=folder,
        steps=steps,
        valid=[each for each in records if each.get("kind") == "valid" and each.get("split") == "valid"],
        record=_record(steps, summary, folder),
        summary=summary,
        options=options,
        account=read_account(folder / LEDGER_FILE) if (folder / LEDGER_FILE).exists() else None,
        checkpoints=tuple(_checkpoints(folder, options, int(steps[0]["step"]), int(steps[-1]["step"]))),
        fp8=_records(folder / FP8_FILE) if (folder / FP8_FILE).exists() else (),
    )


def _metrics(folder: Path) -> list[Mapping[str, Any]]:
    """Records that name their step, in its order."""
    path = folder / METRICS_FILE
    if not path.exists():
        raise UsageError(
            f"{folder} is not a run's folder: it holds no {METRICS_FILE}.",
            why="a run writes it there from its first step on.",
            mend="name the folder that --save named.",
        )
    records = _records(path)
    named = [each for each in records if number(each.get("step")) is not None]
    return sorted(named, key=lambda record: float(record["step"]))


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _summary(folder: Path) -> Mapping[str, Any]:
    path = folder / SUMMARY_FILE
    if not path.exists():
        return {}
    try:
        return read_summary(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _options(folder: Path) -> Mapping[str, Any]:
    """config.toml as it stands there, unchecked: it may be of an earlier release."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    flat: dict[str, Any] = {}
    for section, values in document.items():
        inner = values.items() if isinstance(values, dict) else [("", values)]
        flat |= {f"{section}.{name}".rstrip("."): value for name, value in inner}
    return {name: value for name, value in flat.items() if name not in OUT_OF_NAMES}


def _record(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], folder: Path) -> RunRecord:
    settled = [each for each in steps if not each.get("profiled")]  # a profiler slows its steps
    try:
        return record_of(settled or steps, summary)
    except (TypeError, ValueError) as error:
        raise _unreadable(folder / METRICS_FILE, f"its values are not a run's ({error})") from error


def _checkpoints(folder: Path, options: Mapping[str, Any], first: int, last: int) -> Iterator[int]:
    """What lies there, and the multiples of --save-interval, of which only the newest may be kept."""
    kept = {path.name.removeprefix("iter_") for path in (folder / CHECKPOINTS).glob("iter_*")}
    found = {int(name) for name in kept if name.isdecimal()}
    interval = options.get("checkpoint.save_interval")
    if isinstance(interval, int) and interval > 0:
        found |= set(range(interval, last + 1, interval))
    yield from sorted(step for step in found if first <= step <= last)


def _unreadable(path: Path, reason: object) -> DataError:
    without = "" if path.name == METRICS_FILE else ", or move it away to make the report without it"
    return DataError(
        f"{path} cannot be read: {reason}.",
        why="the report states its numbers as they were written.",
        mend=f"restore the file{without}.",
    )


def facts_of_run(run: RunData) -> list[tuple[str, str]]:
    """The environment: where it ran, on what, with which versions and data."""
    summary = run.summary
    hardware = mapping(summary.get("hardware"))
    rows = [("folder", str(run.folder)), ("outcome", str(summary.get("outcome") or "not ended"))]
    if not hardware and run.device:
        rows.append(("device: name", run.device))
    for name in ("steps", "consumed_samples", "consumed_tokens", "parameters", "skipped_steps", "world_size"):
        if (value := number(summary.get(name))) is not None:
            rows.append((name.replace("_", " "), f"{value:,.0f}"))
    if (wall_s := number(summary.get("wall_time_s"))) is not None:
        rows.append(("wall time of the last process", f"{wall_s:,.1f} s"))
    rows += [
        (f"device: {name.replace('_', ' ')}", _plain(value)) for name, value in hardware.items() if value
    ]
    rows += [(f"version: {name}", str(value)) for name, value in mapping(summary.get("versions")).items()]
    for part in objects(summary.get("data")):
        epochs = number(part.get("epochs"))
        often = "" if epochs is None else f", {epochs:.3g} epochs"
        rows.append((f"data: {part.get('split')}", f"{part.get('name')}{often}"))
    rows += [(f"file: {name}", str(path)) for name, path in mapping(summary.get("files")).items()]
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ".".join(map(str, value))
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
