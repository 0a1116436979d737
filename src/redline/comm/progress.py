"""Where a rank stands: the step, what it does, and the last collective it began, for the others to read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from redline.comm.pace import Pace


@dataclass(slots=True)
class Progress:
    """Written by the rank's main thread, read by its watchdog; a few attribute writes an operation.

    Attributes:
        step: that is running, from 1.
        operation: what was begun last: "microbatch 3 of 8", "an evaluation".
        collective: what it has begun to send within that, or "": "tp all-reduce of 64 MiB".
        count: operations and collectives begun so far, as many on all ranks that stand at the same place;
            while it stands still, nothing happens.
        patient: whether something is going on that may take long: the start up to the end of the first step,
            an evaluation, a save.
        pace: times the work between the waits for others, where that was asked for.
    """

    step: int = 0
    operation: str = "opening the run"
    collective: str = ""
    count: int = 0
    patient: bool = True
    since: float = field(default_factory=time.monotonic)
    pace: Pace | None = None

    def begins(self, operation: str) -> None:
        """Note that `operation` begins."""
        self.operation, self.collective = operation, ""
        self._counts()

    def meets(self, collective: str) -> None:
        """Note that the rank begins to wait for, or send to, others."""
        self.collective = collective
        self._counts()

    @contextmanager
    def patiently(self, operation: str) -> Iterator[None]:
        """Within, `operation` may take as long as the start."""
        before, self.patient = self.patient, True
        self.begins(operation)
        try:
            yield
        finally:
            self.patient = before
            self.begins(f"after {operation}")

    def _counts(self) -> None:
        self.since = time.monotonic()
        self.count += 1
