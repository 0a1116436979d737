"""What a run reached, summarised while it goes: medians over steps, warm-up steps left out."""

from __future__ import annotations

import statistics
from array import array
from dataclasses import dataclass, field

from redline.ledger.metrics import StepRecord

WARMUP_STEPS = 3  # compilation, caches, allocator growth


@dataclass(slots=True)
class RunStatistics:
    """Fed one record a step; costs 16 bytes a step.

    Attributes:
        warmup_steps: how many steps at the start of this process are left out of medians (as long as others
            exist).
    """

    warmup_steps: int = WARMUP_STEPS
    last: StepRecord | None = None
    peak_memory_bytes: int = 0
    skipped_steps: int = 0
    _times_s: array[float] = field(default_factory=lambda: array("d"))
    _rates: array[float] = field(default_factory=lambda: array("d"))

    def add(self, record: StepRecord) -> None:
        """Take one step into account."""
        self.last = record
        self.peak_memory_bytes = max(self.peak_memory_bytes, record.memory)
        self.skipped_steps += record.skipped
        self._times_s.append(record.step_time_s)
        self._rates.append(record.tokens_per_s)

    @property
    def steps(self) -> int:
        """Steps of this process."""
        return len(self._times_s)

    @property
    def step_time_s(self) -> float | None:
        """Median wall time of a step."""
        return self._median(self._times_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Median rate of all devices together."""
        return self._median(self._rates)

    @property
    def step_time_spread(self) -> float | None:
        """Distance of the quartiles of the step time over its median; None below 4 steps."""
        values = self._settled(self._times_s)
        if len(values) < 4:
            return None
        lower, middle, upper = statistics.quantiles(values, n=4)
        return (upper - lower) / middle if middle else None

    def _median(self, values: array[float]) -> float | None:
        settled = self._settled(values)
        return statistics.median(settled) if settled else None

    def _settled(self, values: array[float]) -> array[float]:
        return values[self.warmup_steps :] or values
