"""A link of fixed speed for tests of overlap, and how much of what it sends hides behind computing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]


@dataclass
class Waited:
    wait: Callable[[], Any]
    is_completed: Callable[[], bool]


class Link:
    """Sends one thing after the other, in a thread of its own, and notes when."""

    def __init__(self, bytes_s: float) -> None:
        self.intervals: list[Interval] = []
        self._bytes_s = bytes_s
        self._queue: queue.Queue[tuple[float, Callable[[], Any]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, num_bytes: int, arrive: Callable[[], Any] = lambda: None) -> Waited:
        """`arrive` is called when the last byte is there."""
        done = threading.Event()

        def end() -> None:
            arrive()
            done.set()

        self._queue.put((num_bytes / self._bytes_s, end))
        return Waited(done.wait, done.is_set)

    def _run(self) -> None:
        while True:
            took, end = self._queue.get()
            start = time.perf_counter()
            time.sleep(took)
            self.intervals.append((start, time.perf_counter()))
            end()


def hidden(computed: Sequence[Interval], sent: Sequence[Interval]) -> float:
    """Seconds of sending during which something was computed; neither overlaps with itself."""
    return sum(
        max(0.0, min(stop, end) - max(begin, start)) for start, end in computed for begin, stop in sent
    )
