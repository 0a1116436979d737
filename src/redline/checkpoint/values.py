"""What of a checkpoint is no tensor, as JSON: counters, cursors, schedules, the model's description."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redline.checkpoint.manifest import to_json
from redline.errors import CheckpointError


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
DIGITS = 6  # of a float that a difference shows


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not the same in two descriptions; a side without the field holds `ABSENT`."""

    name: str
    saved: Any
    wanted: Any

    def __str__(self) -> str:
        saved, wanted = _short(self.saved), _short(self.wanted)
        if saved == wanted:  # they differ behind the digits that people read
            saved, wanted = repr(self.saved), repr(self.wanted)
        return f"{self.name}: {saved} in the checkpoint, {wanted} now"


def compare_values(saved: Any, wanted: Any, name: str = "") -> list[Difference]:
    """Every field whose value differs, objects compared key by key, anything else as a whole.

    >>> [str(d) for d in compare_values({"model": {"layers": 2}}, {"model": {"layers": 4}})]
    ['model.layers: 2 in the checkpoint, 4 now']
    """
    if not (isinstance(saved, Mapping) and isinstance(wanted, Mapping)):
        return [] if saved == wanted else [Difference(name, saved, wanted)]
    return [
        difference
        for key in dict.fromkeys((*saved, *wanted))
        for difference in compare_values(
            saved.get(key, ABSENT), wanted.get(key, ABSENT), f"{name}.{key}" if name else str(key)
        )
    ]


def _short(value: Any) -> str:
    """A value for people: 2.4000000000000004 is 2.4."""
    if value is None:
        return "unset"
    return repr(float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value)


def values_to_json(values: Mapping[str, Any]) -> bytes:
    """The content of `values.json`; Python's own floats and integers come back bit for bit.

    Raises: CheckpointError that names a value which JSON would change or cannot hold (a tensor, a tuple, a
        NaN, a key that is no string): what is loaded must equal what was saved.
    """
    for name, value in _leaves(dict(values), "values"):
        raise CheckpointError(
            f"{name} cannot be saved: {value!r} is no JSON value.",
            why="non-tensor state is stored as JSON: null, true, finite numbers, strings, lists, objects.",
            mend="convert it before saving (a tensor belongs among the tensors).",
        )
    return to_json(dict(values))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Name and content of each part that is not JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}") if isinstance(key, str) else [(name, key)]
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{index}]")
    elif isinstance(value, float):
        yield from () if math.isfinite(value) else [(name, value)]
    elif not (value is None or isinstance(value, str | int)):
        yield name, value
