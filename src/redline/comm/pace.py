"""How long a rank works by itself in a step: without what it waits for the others.

Ranks that share every step take the same time for it, whichever of them is slow. What tells them apart is the
stretch from the first collective of the step to the one that needs all gradients, less the waits inside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event
Stretch = tuple[Mark, Mark]


class Pace:
    """A stopwatch of one rank; on a GPU it runs on the stream that computes, and nobody waits for it.

    Waits for others inside the stretch are left out, those of tensor-parallel layers too.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start: Mark | None = None
        self._whole: Stretch | None = None
        self._waits: list[Stretch] = []

    def starts(self) -> None:
        """The rank begins to work by itself."""
        self._waits.clear()
        self._whole, self._start = None, self._mark()

    def stops(self) -> None:
        """From here on it needs the others."""
        assert self._start is not None
        self._whole, self._start = (self._start, self._mark()), None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, the rank waits for others; outside of a stretch of work that is nobody's concern."""
        if self._start is None:
            yield
            return
        begun = self._mark()
        yield
        self._waits.append((begun, self._mark()))

    def worked_s(self) -> float:
        """Seconds of the last stretch; on a GPU the stream must have passed its end."""
        if self._whole is None:
            return 0.0
        return _seconds(self._whole) - sum(map(_seconds, self._waits))

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(stretch: Stretch) -> float:
    start, end = stretch
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3
