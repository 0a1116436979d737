"""Predicted memory by class beside what was measured.

A run measures what is always held by the size of its buffers, and what a step adds to them as one sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redline.report.html.runs import RunData
from redline.report.html.values import mapping, number

# The start of a part's name in summary.json -> its class.
CLASSES = (("weights", "weights"), ("main_params", "weights"), ("main_grads", "gradients"),
           ("grad", "gradients"), ("exp_avg", "optimizer"), ("activations", "activations"),
           ("workspace", "workspace"))  # fmt: skip


STEP = "activations_and_workspace"  # measured: what a step adds
RESERVE = "kept_in_reserve"  # measured: beside the peak, not in it


@dataclass(frozen=True, slots=True)
class Segment:
    """A class in a bar: its bytes, and its width in percent of the longest bar."""

    kind: str
    num_bytes: float
    width: float


@dataclass(frozen=True, slots=True)
class Row:
    """A part, its class, what was predicted and measured of it; None where it is not known apart."""

    name: str
    kind: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was predicted and what was measured, in all and by part; either may be None.

    Attributes:
        predicted_bar, measured_bar: by class; the measured one in one piece where only the sum is known.
        saved: what a forward pass keeps for its backward, by module; none where a run counted none.
        saved_unknown: why a run could not count it.
        capacity_at: percent of the longest bar; None where not known or off the scale.
        ratio: predicted over measured, on a GPU; a CPU's measure counts whatever else its process holds.
    """

    rows: Sequence[Row]
    predicted_bar: Sequence[Segment]
    measured_bar: Sequence[Segment]
    predicted: float | None
    peak_at: str
    measured: float | None
    measure: str
    capacity: float | None
    capacity_at: float | None
    ratio: float | None
    saved: Sequence[Row] = ()
    saved_unknown: str = ""


def memory_of(run: RunData) -> Memory | None:
    """Of summary.json, or the greatest peak in metrics.jsonl; None where neither says anything."""
    document = mapping(run.summary.get("predicted_memory"))
    sizes = _sizes(document.get("parts"))
    found = _sizes(run.summary.get("measured_memory"))
    predicted, measured = number(document.get("total")), number(run.record.memory_bytes)
    if predicted is None and measured is None:
        return None
    activations = mapping(run.summary.get("measured_activations"))
    hardware = mapping(run.summary.get("hardware"))
    capacity, on_gpu = number(hardware.get("memory_bytes")), hardware.get("kind") == "cuda"
    whole = max(predicted or 0.0, sum(sizes.values()), measured or 0.0, (on_gpu and capacity) or 0.0) or 1.0
    return Memory(
        rows=_rows(sizes, found),
        predicted_bar=_bar(sizes, whole),
        measured_bar=_bar(found, whole)
        or [Segment("measured", measured or 0.0, 100 * (measured or 0.0) / whole)],
        predicted=predicted,
        peak_at=str(document.get("peak_at") or ""),
        measured=measured,
        measure=str(run.summary.get("memory_measure") or "peak in metrics.jsonl"),
        capacity=capacity,
        capacity_at=100 * capacity / whole if on_gpu and capacity else None,
        ratio=predicted / measured if on_gpu and predicted and measured else None,
        saved=_saved(document, activations),
        saved_unknown=str(activations.get("unknown") or ""),
    )


def _saved(predicted: Mapping[str, object], activations: Mapping[str, object]) -> list[Row]:
    """Module by module, then their sum."""
    sizes, found = _sizes(predicted.get("saved")), _sizes(activations.get("by_module"))
    if not found:
        return []
    names = dict.fromkeys((*sizes, *found))
    rows = [Row(name, "activations", sizes.get(name, 0.0), found.get(name, 0.0)) for name in names]
    return [*rows, Row("in all", "activations", sum(sizes.values()), sum(found.values()))]


def class_of(part: str) -> str:
    """weights, gradients, optimizer, activations, workspace or other."""
    return next((kind for start, kind in CLASSES if part.startswith(start)), "other")


def _sizes(parts: object) -> dict[str, float]:
    """Part -> bytes, without those that take none."""
    sizes = {name: number(size) for name, size in mapping(parts).items()}
    return {name: size for name, size in sizes.items() if size}


def _bar(sizes: Mapping[str, float], whole: float) -> list[Segment]:
    sums: dict[str, float] = {}
    for name, size in sizes.items():
        if name != RESERVE:
            sums[class_of(name)] = sums.get(class_of(name), 0.0) + size
    return [Segment(kind, size, round(100 * size / whole, 3)) for kind, size in sums.items()]


def _rows(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[Row]:
    """Every part; then what a step adds, whose predicted parts stand above it, and the reserve."""
    names = dict.fromkeys([*predicted, *(name for name in measured if name not in (STEP, RESERVE))])
    rows = [Row(name, class_of(name), predicted.get(name), measured.get(name)) for name in names]
    if STEP in measured:
        together = sum(
            size for name, size in predicted.items() if class_of(name) in ("activations", "workspace")
        )
        rows.append(Row(f"{STEP}, together", "activations", together or None, measured[STEP]))
    if RESERVE in measured:
        rows.append(Row(RESERVE, "other", None, measured[RESERVE]))
    return rows
