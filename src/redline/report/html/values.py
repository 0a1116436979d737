"""Plain values out of a run's files, taken for what they are: a file may be of another version, or edited."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, else None."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """A JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a JSON array, else none."""
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return [each for each in listed if isinstance(each, Mapping)]


def plural(count: int, word: str) -> str:
    """1 run, 2 runs."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def points(share: float) -> str:
    """A share in points with its sign: +1.5, -22.5; what rounds to nothing gets a second digit, or none."""
    value = 100 * share
    if abs(value) < 0.005:
        return "0"
    return f"{value:+.1f}" if abs(value) >= 0.05 else f"{value:+.2f}"


def share(value: float) -> str:
    """A part of a whole: 0, 12%, 0.35%, 1.2e-05; what is there is never shown as nothing."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-5 else f"{100 * value:.3g}%"


def shown(value: float, digits: int = 4) -> str:
    """A number as people read it: 1,234,567 or 0.01234 or 1.2e-05."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
