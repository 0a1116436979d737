"""Where a rank stands: the step and the last operation it began, for the others to read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from redline.comm.pace import Pace
from redline.units import format_bytes


@dataclass(slots=True)
class Progress:
    """Written by the rank's main thread, read by its watchdog; a few attribute writes an operation.

    Attributes:
        step: that is running, from 1.
        operation: what was begun last: "forward of microbatch 3", "all-reduce of 64 MiB".
        count: operations begun so far; while it stands still, nothing happens.
        patient: whether something is going on that may take long: the start up to the end of the first step,
            an evaluation, a save.
        pace: times the work between the waits for others, where that was asked for.
    """

    step: int = 0
    operation: str = "opening the run"
    count: int = 0
    patient: bool = True
    since: float = field(default_factory=time.monotonic)
    pace: Pace | None = None

    def begins(self, operation: str) -> None:
        """Note that `operation` begins."""
        self.operation = operation
        self.since = time.monotonic()
        self.count += 1

    def sends(self, kind: str, tensor: Tensor) -> None:
        """Note a collective."""
        self.begins(f"{kind} of {format_bytes(tensor.nbytes)}")

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
