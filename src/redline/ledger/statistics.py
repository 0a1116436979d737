"""What a run reached, summarised while it goes: medians over steps, without warm-up and profiled ones."""

from __future__ import annotations

import statistics
from array import array
from dataclasses import dataclass, field

from redline.ledger.metrics import StepRecord

WARMUP_STEPS = 3  # compilation, caches, allocator growth


@dataclass(slots=True)
class RunStatistics:
    """Fed one record a step; costs 17 bytes a step.

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
    _profiled: bytearray = field(default_factory=bytearray)

    def add(self, record: StepRecord) -> None:
        """Take one step into account."""
        self.last = record
        self.peak_memory_bytes = max(self.peak_memory_bytes, record.memory)
        self.skipped_steps += record.skipped
        self._times_s.append(record.step_time_s)
        self._rates.append(record.tokens_per_s)
        self._profiled.append(record.profiled)

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

    def _settled(self, values: array[float]) -> list[float]:
        """Neither warm-up nor profiled; where there are no such, the best that there is."""
        at = self.warmup_steps
        plain = [value for value, profiled in zip(values, self._profiled, strict=True) if not profiled]
        settled = [
            value for value, profiled in zip(values[at:], self._profiled[at:], strict=True) if not profiled
        ]
        return settled or plain or list(values)
