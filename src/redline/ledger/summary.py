"""summary.json: what a run was, what it reached and what was predicted, as one document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redline.choice import Choice
from redline.errors import TrainingError
from redline.files import os_errors_as, write_json_atomic
from redline.ledger.metrics import finite
from redline.ledger.mfu import Utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The end of a run.

    Attributes:
        name: of the run.
        outcome: one sentence: finished, or why it stopped early.
        steps, consumed_samples, consumed_tokens: of the whole run, earlier processes included.
        wall_time_s: of this process.
        parameters: of the model, tied ones once.
        hardware: Hardware.as_dict().
        utilisation: MFU in each convention.
        tokens_per_s, step_time_s: medians, warm-up left out.
        predicted_memory: MemoryEstimate.as_dict(); holds "total".
        measured_memory_bytes: peak, None when it cannot be measured.
        memory_measure: how it was measured, for example "peak allocated by torch on the GPU".
        train_loss, valid_loss, unigram_loss: nats per token; the last two where they were computed. The
            unigram model knows only how often each token occurs: what a model must beat to have learnt
            anything.
        choices: what ran in place of every `auto`.
        files: what -> path.
        versions: package -> version.
        extra: further values by name.
    """

    name: str
    outcome: str
    steps: int
    consumed_samples: int
    consumed_tokens: int
    wall_time_s: float
    parameters: int
    hardware: Mapping[str, Any]
    utilisation: Sequence[Utilisation] = ()
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    predicted_memory: Mapping[str, Any] | None = None
    measured_memory_bytes: int | None = None
    memory_measure: str = ""
    train_loss: float | None = None
    valid_loss: float | None = None
    unigram_loss: float | None = None
    skipped_steps: int = 0
    choices: Sequence[Choice] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The document as it is written, NaN and Inf as None."""
        values = {
            name: getattr(self, name) for name in self.__slots__ if name not in ("extra", "utilisation")
        }
        values["mfu"] = {each.convention: each.as_dict() for each in self.utilisation}
        values["choices"] = [asdict(choice) for choice in self.choices]
        document: dict[str, Any] = finite(values | dict(self.extra))
        return document


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write the document atomically.

    Raises: TrainingError when it cannot be written.
    """
    with os_errors_as(TrainingError, path, "write"):
        write_json_atomic(path, summary.as_dict())


# What a reader may rely on: these are of that kind, or null, or absent.
_KINDS = {"hardware": dict, "predicted_memory": dict, "mfu": dict, "versions": dict, "files": dict,
          "choices": list, "data": list}  # fmt: skip
# And who compares memory; a part stands behind its whole.
_MEMORY_KINDS = {
    "measured_memory": dict, "measured_activations": dict, "predicted_memory.total": int, "world_size": int,
    "parameters": int, "measured_memory_bytes": int, "measured_after_forward": int,
}  # fmt: skip
_MEMORY_SIZES = ("measured_memory", "measured_activations.by_module")
_WORDS: dict[type, str] = {dict: "object", list: "list", int: "whole number"}


def read_summary(path: Path) -> dict[str, Any]:
    """The document as plain values.

    Raises: OSError; ValueError when the file is no JSON, or no summary of a run.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"it holds a {type(document).__name__}, not an object")
    _check_kinds(document, _KINDS)
    named = ("what", "asked", "ran", "why")
    if not all(
        isinstance(each, dict) and each.keys() >= set(named) for each in document.get("choices") or ()
    ):
        raise ValueError(f"one of its choices does not name {', '.join(named)}")
    return document


def read_memory_summary(path: Path) -> dict[str, Any]:
    """The same, with what it says of measured memory held to what it must be."""
    document = read_summary(path)
    _check_kinds(document, _MEMORY_KINDS)
    for name in _MEMORY_SIZES:
        sizes = _at(document, name) or {}
        if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
            raise ValueError(f"its {name} does not name whole numbers of bytes")
    return document


def _check_kinds(document: dict[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(_at(document, name), kind | None):
            raise ValueError(f"its {name} is no {_WORDS[kind]}")


def _at(document: dict[str, Any], name: str) -> Any:
    """What stands under a name, or under the second of "one.two"; None for nothing."""
    whole, _, part = name.partition(".")
    return (document.get(whole) or {}).get(part) if part else document.get(whole)
