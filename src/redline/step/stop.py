"""When a run ends before its last iteration: a signal, a time limit, an iteration limit."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType


def own_view(*numbers: int) -> tuple[int, ...]:
    """One process agrees with itself."""
    return numbers


@dataclass(slots=True)
class StopConditions:
    """Answers, after each step, whether the run should end now, and why.

    Clocks and signals differ from rank to rank, so the ranks take the largest of what each knows: all end
    after the same step.

    Args:
        exit_interval: end when the iteration is a multiple of this (None: never).
        exit_duration_min: end once this many minutes have passed since `started` (None: never).
        agree: the largest of each number over all ranks.
        started: what time.perf_counter said at the start of the run, by default now.
    """

    exit_interval: int | None = None
    exit_duration_min: float | None = None
    signal_name: str | None = None
    agree: Callable[..., tuple[int, ...]] = own_view
    started: float = field(default_factory=time.perf_counter)

    def reason(self, iteration: int) -> str | None:
        """One sentence when the run should end after `iteration`, else None."""
        minutes = (time.perf_counter() - self.started) / 60
        late = self.exit_duration_min is not None and minutes >= self.exit_duration_min
        number = 0 if self.signal_name is None else signal.Signals[self.signal_name].value
        number, too_late = self.agree(number, int(late))
        if number:
            return f"{signal.Signals(number).name} received"
        if self.exit_interval and iteration % self.exit_interval == 0:
            return f"--exit-interval {self.exit_interval} reached"
        if too_late:
            return f"--exit-duration-in-mins {self.exit_duration_min:g} reached"
        return None


class SignalWatch:
    """Turns SIGTERM and SIGINT into a request to stop after the running step.

    The first signal is noted in `conditions`; a second one, but for an echo of the first, ends the process
    immediately, as the old handlers do. Handlers can only be set in the main thread; elsewhere this watches
    nothing.

    Args:
        tell: called with the signal's name, from inside its handler: the step may take a while yet.
        echo_s: a second signal within this time is the first one once more.
    """

    def __init__(
        self,
        conditions: StopConditions,
        *,
        enabled: bool = True,
        tell: Callable[[str], object] = lambda name: None,
        echo_s: float = 0.0,
    ) -> None:
        self._conditions, self._tell = conditions, tell
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._old: dict[int, object] = {}
        self._echo_s, self._first = echo_s, -math.inf

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
        now = time.monotonic()
        if self._conditions.signal_name is not None:
            if now - self._first >= self._echo_s:
                self._restore()
                signal.raise_signal(number)
            return
        self._first = now
        self._conditions.signal_name = signal.Signals(number).name
        self._tell(self._conditions.signal_name)

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._old.clear()
