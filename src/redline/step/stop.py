"""When a run ends before its last iteration: a signal, a time limit, an iteration limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType


@dataclass(slots=True)
class StopConditions:
    """Answers, after each step, whether the run should end now, and why.

    Args:
        exit_interval: end when the iteration is a multiple of this (None: never).
        exit_duration_min: end once this many minutes have passed since construction (None: never).
    """

    exit_interval: int | None = None
    exit_duration_min: float | None = None
    signal_name: str | None = None
    _started: float = field(default_factory=time.monotonic)

    def reason(self, iteration: int) -> str | None:
        """One sentence when the run should end after `iteration`, else None."""
        if self.signal_name is not None:
            return f"{self.signal_name} received"
        if self.exit_interval and iteration % self.exit_interval == 0:
            return f"--exit-interval {self.exit_interval} reached"
        minutes = (time.monotonic() - self._started) / 60
        if self.exit_duration_min is not None and minutes >= self.exit_duration_min:
            return f"--exit-duration-in-mins {self.exit_duration_min:g} reached"
        return None


class SignalWatch:
    """Turns SIGTERM and SIGINT into a request to stop after the running step.

    The first signal is noted in `conditions`; the old handlers come back at once, so that a second one ends
    the process immediately. Handlers can only be set in the main thread; elsewhere this watches nothing.

    Args:
        tell: called with the signal's name, from inside its handler: the step may take a while yet.
    """

    def __init__(
        self,
        conditions: StopConditions,
        *,
        enabled: bool = True,
        tell: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._conditions, self._tell = conditions, tell
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._old: dict[int, object] = {}

    def __enter__(self) -> SignalWatch:
        if self._enabled:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._conditions.signal_name = signal.Signals(number).name
        self._restore()
        self._tell(self._conditions.signal_name)

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._old.clear()
