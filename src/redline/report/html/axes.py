"""Axes: where a value lies between 0 and 1000 of a plot, and the round values that are written beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from redline.report.html.values import shown

SIZE = 1000.0  # a plot's inner coordinates, both ways; the page stretches them to any shape
TICKS = 5


@dataclass(frozen=True, slots=True)
class Tick:
    """A value, its place along the axis in percent, and how it is written."""

    value: float
    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, linear or by decades."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one; not cut at the ends."""
        if self.log:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[Tick]:
        """Round values inside, at most a handful."""
        return [
            Tick(value, round(100 * self.place(value), 2), short(value)) for value in self._round_values()
        ]

    def _round_values(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first + 1) / (TICKS + 1)))
            return [10.0**power for power in range(first, last + 1, every)]
        step = round_step((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [each * step for each in range(first, math.floor(self.high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """1500000 -> '1.5M', as an axis has room for."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    return "0" if value == 0 else shown(value, 3) if abs(value) < 1 else f"{value:.4g}"


def round_step(width: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `width`."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width * (1 - 1e-9))


def linear_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """Around these values, with a little air."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low if from_zero and low == 0 else low - air, high + air)


def log_axis(values: Sequence[float], *, whole: bool = False) -> Axis:
    """Around these positive values; `whole` decades, or with a little air."""
    low, high = min(values), max(values)
    if whole:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return Axis(low, high if high > low else 10 * low, log=True)
    return Axis(low / 1.2, high * 1.2, log=True)
