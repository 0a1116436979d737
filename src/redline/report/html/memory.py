"""Predicted memory by class beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redline.report.html.runs import RunData
from redline.report.html.values import mapping, number

# The start of a part's name in summary.json -> its class.
CLASSES = (("weights", "weights"), ("main_params", "weights"), ("main_grads", "gradients"),
           ("grad", "gradients"), ("exp_avg", "optimizer"), ("activations", "activations"),
           ("workspace", "workspace"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one part, its class, and its width in percent of the longest bar."""

    name: str
    kind: str
    num_bytes: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was predicted, part by part, and what was measured; either may be None.

    Attributes:
        classes: the parts added up by class.
        measured_width, capacity_at: percent of the longest bar; None where not known or off the scale.
        ratio: predicted over measured, on a GPU; a CPU's measure counts whatever else its process holds.
    """

    parts: Sequence[Part]
    classes: Sequence[Part]
    predicted: float | None
    peak_at: str
    measured: float | None
    measure: str
    measured_width: float
    capacity: float | None
    capacity_at: float | None
    ratio: float | None


def memory_of(run: RunData) -> Memory | None:
    """Of summary.json, or the greatest peak in metrics.jsonl; None where neither says anything."""
    document = mapping(run.summary.get("predicted_memory"))
    sizes = {name: number(size) or 0.0 for name, size in mapping(document.get("parts")).items()}
    predicted, measured = number(document.get("total")), number(run.record.memory_bytes)
    if predicted is None and measured is None:
        return None
    hardware = mapping(run.summary.get("hardware"))
    capacity, on_gpu = number(hardware.get("memory_bytes")), hardware.get("kind") == "cuda"
    whole = max(predicted or 0.0, sum(sizes.values()), measured or 0.0, (on_gpu and capacity) or 0.0) or 1.0
    return Memory(
        parts=[Part(name, class_of(name), size, 100 * size / whole) for name, size in sizes.items() if size],
        classes=_classes(sizes, whole),
        predicted=predicted,
        peak_at=str(document.get("peak_at") or ""),
        measured=measured,
        measure=str(run.summary.get("memory_measure") or "peak in metrics.jsonl"),
        measured_width=100 * (measured or 0.0) / whole,
        capacity=capacity,
        capacity_at=100 * capacity / whole if on_gpu and capacity else None,
        ratio=predicted / measured if on_gpu and predicted and measured else None,
    )


def class_of(part: str) -> str:
    """weights, gradients, optimizer, activations, workspace or other."""
    return next((kind for start, kind in CLASSES if part.startswith(start)), "other")


def _classes(sizes: Mapping[str, float], whole: float) -> list[Part]:
    sums: dict[str, float] = {}
    for name, size in sizes.items():
        sums[class_of(name)] = sums.get(class_of(name), 0.0) + size
    return [Part(name, name, size, round(100 * size / whole, 3)) for name, size in sums.items() if size]
