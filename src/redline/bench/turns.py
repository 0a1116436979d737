"""Device time of calls that take turns, out of samples in which the host was ahead of the device.

A sample is the time between two events, the device's own only where the host had queued the whole call
before the first of them came to pass: a thread that wakes on an idle virtual CPU costs up to a millisecond,
and the gap between kernels would be counted as theirs. Such a sample is late: it is taken again, with twice
the head start.

A call takes up to 0.5% longer behind one neighbour than behind another, so that each round has an order of
its own.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from redline.units import MIB

CACHE_BYTES = 256 * MIB  # written before each call: more than any L2 cache holds
HEAD_START = 2_000_000  # cycles that the device waits, about a millisecond: the host queues a call meanwhile
TRIES = 4  # at one sample: the last one gives the host eight times as long
MEDIAN_OF_MEAN = (math.pi / 2) ** 0.5  # standard error of a median in that of a mean
SIGMA_OF_DEVIATION = 1 / statistics.NormalDist().inv_cdf(
    0.75
)  # of the median deviation, which outliers leave
PATIENT_ROUNDS = 2  # a call that was late at every try of so many waits for the device itself: one try then


class Mark(Protocol):
    """A point in the device's time, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device is past it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`, both past."""


class Clock(Protocol):
    """A device on which calls are queued and timed."""

    def hold(self, cycles: int) -> None:
        """Queue what makes the next call start cold, and a wait of so many cycles."""

    def mark(self) -> Mark:
        """Queue a point in time."""

    def finish(self) -> None:
        """Wait until all that was queued has been done."""


class CudaClock:
    """The current stream of a GPU; the L2 cache is overwritten before each call."""

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)

    def hold(self, cycles: int) -> None:
        """Overwrite the cache, then wait."""
        self._cache.zero_()
        torch.cuda._sleep(cycles)

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()


@dataclass(slots=True)
class Turns:
    """The samples of one call.

    Attributes:
        valid_s: seconds of the samples in which the host was ahead, one a round.
        late_s: of the late ones. A call that itself waits for the device has no others.
    """

    valid_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Whether the host was never ahead: gaps between kernels are then part of `seconds`."""
        return not self.valid_s

    @property
    def seconds(self) -> float:
        """The median where the host was ahead, else the shortest: the one with the fewest gaps."""
        return min(self.late_s) if self.late else statistics.median(self.valid_s)

    @property
    def error_s(self) -> float | None:
        """Standard error of the median, were the samples normal but for outliers; None of fewer than two."""
        count = len(self.valid_s)
        if count < 2:
            return None
        middle = statistics.median(self.valid_s)
        spread = SIGMA_OF_DEVIATION * statistics.median(abs(each - middle) for each in self.valid_s)
        return float(MEDIAN_OF_MEAN * spread / count**0.5)

    def is_ahead_of(self, other: Turns) -> bool:
        """Whether it is faster by more than both errors, twice over: once in 40 times by chance alone."""
        errors = math.hypot(self.error_s or 0.0, other.error_s or 0.0)
        return self.seconds < other.seconds - 2 * errors


def take_turns(calls: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock) -> dict[str, Turns]:
    """Time each call once a round, in an order drawn for the round: the same in every run."""
    found = {name: Turns() for name in calls}
    for turn in range(rounds):
        taken = {
            name: _sample(calls[name], clock, TRIES if turn < PATIENT_ROUNDS or found[name].valid_s else 1)
            for name in random.Random(turn).sample(list(calls), len(calls))
        }
        clock.finish()
        for name, (spans, valid) in taken.items():
            seconds = [start.elapsed_time(end) / 1e3 for start, end in spans]
            if valid:
                found[name].valid_s.append(seconds.pop())
            found[name].late_s += seconds
    return found


def _sample(call: Callable[[], Any], clock: Clock, tries: int) -> tuple[list[tuple[Mark, Mark]], bool]:
    """Try until the host is ahead; each try's two marks, and whether the last one is valid."""
    spans: list[tuple[Mark, Mark]] = []
    for attempt in range(tries):
        clock.hold(HEAD_START << attempt)
        start = clock.mark()
        call()
        spans.append((start, clock.mark()))
        if not start.query():
            return spans, True
    return spans, False
