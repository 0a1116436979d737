"""Which ranks of a run are slow: each one's own time of a step beside the others'."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redline.units import format_duration


@dataclass(frozen=True, slots=True)
class Skew:
    """Own seconds of a mean step, one a rank: data, forward and backward, waits for others left out."""

    step: int
    times_s: tuple[float, ...]

    @property
    def order(self) -> list[int]:
        """Ranks, the slowest first."""
        return sorted(range(len(self.times_s)), key=lambda rank: -self.times_s[rank])

    @property
    def skew(self) -> float:
        """How much longer the slowest takes than the median rank (of two: the lower), as a share of it."""
        median = statistics.median_low(self.times_s)
        return max(self.times_s) / median - 1 if median > 0 else 0.0

    def words(self, count: int) -> str:
        """One line that names the `count` slowest and fastest ranks."""
        order = self.order
        return (
            f"step {self.step}: slowest {self._named(order[:count])} of own work a step, {self.skew:.1%} "
            f"above the median rank; fastest {self._named(order[::-1][:count])}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The record as it is written."""
        return {
            "kind": "ranks",
            "step": self.step,
            "slowest_rank": self.order[0],
            "skew": self.skew,
            "own_time_s": list(self.times_s),
        }

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} {format_duration(self.times_s[rank])}" for rank in ranks)
