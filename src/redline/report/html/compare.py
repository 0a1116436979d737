"""Two runs or more beside each other: their numbers, and everything in which they were asked to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.report.html.headline import Figure
from redline.report.html.runs import RunData
from redline.report.html.values import mapping, objects

ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Beside:
    """A row: a measure, its figure in each run, the change against the first run ("" for that one)."""

    label: str
    figures: Sequence[Figure | None]
    changes: Sequence[str]
    best: int | None


def beside(headlines: Sequence[Sequence[Figure]]) -> list[Beside]:
    """The headlines as a table, one row a measure that any run has."""
    found = [{figure.key: figure for figure in figures} for figures in headlines]
    keys = dict.fromkeys(key for figures in found for key in figures)
    return [_row([figures.get(key) for figures in found]) for key in keys]


def _row(figures: Sequence[Figure | None]) -> Beside:
    label = next(figure.label for figure in figures if figure is not None)
    values = [None if figure is None else figure.value for figure in figures]
    first = values[0]
    shares = "MFU" in label
    changes = [
        "" if not place or value is None or not first else _change(value, first, shares)
        for place, value in enumerate(values)
    ]
    better = next(figure.better for figure in figures if figure is not None)
    known = [value * better for value in values if value is not None]
    best = max(known) if better and len(set(known)) > 1 else None
    places = (place for place, value in enumerate(values) if value is not None and value * better == best)
    return Beside(label, figures, changes, None if best is None else next(places))


def _change(value: float, first: float, shares: bool) -> str:
    """In percent of the first; that of a share in points, since a percentage of a percentage misleads."""
    return f"{100 * (value - first):+.1f} pts" if shares else f"{value / first - 1:+.1%}"


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """(what, its value in each run) for everything in which they differ: options, choices, machine, versions.

    What one of them does not state (ABSENT) comes last.
    """
    stated = [dict(_stated(run)) for run in runs]
    keys = dict.fromkeys(key for values in stated for key in values)
    rows = [(key, [values.get(key, ABSENT) for values in stated]) for key in keys]
    return sorted((row for row in rows if len(set(row[1])) > 1), key=lambda row: ABSENT in row[1])


def _stated(run: RunData) -> Sequence[tuple[str, str]]:
    summary: Mapping[str, Any] = run.summary
    rows = [(name, _word(value)) for name, value in run.options.items()]
    rows += [(f"ran: {each.get('what')}", str(each.get("ran"))) for each in objects(summary.get("choices"))]
    hardware = mapping(summary.get("hardware"))
    rows += [(f"device: {name}", str(hardware[name])) for name in ("name", "num_devices") if name in hardware]
    rows += [(f"version: {name}", str(value)) for name, value in mapping(summary.get("versions")).items()]
    if run.devices is not None:
        rows.append(("devices", str(run.devices)))
    return rows


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
