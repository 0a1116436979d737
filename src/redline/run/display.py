"""What a run prints while it goes: a live bar on a terminal, Megatron's log lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import TracebackType

from redline.files import discard
from redline.ledger import StepRecord, ValidRecord
from redline.report import TrainProgress, step_line, valid_line


def say(text: str) -> None:
    """Print a line at once.

    A run does not end with its reader: once stdout is gone (`| head`, a log on a full disk), what would be
    printed is dropped, and stderr says so once.
    """
    try:
        print(text, flush=True)
    except OSError as lost:
        discard(sys.stdout)
        note = f"stdout is lost ({lost.strerror}): the run goes on without it; its folder has every number."
        try:
            print(note, file=sys.stderr, flush=True)
        except OSError:  # both went into the same pipe
            discard(sys.stderr)


class Display:
    """Shows steps, evaluations and messages.

    Args:
        total_steps, start_step: of the run.
        log_interval: steps between lines where there is no terminal.
        throughput: show TFLOP/s too.
        live: draw a bar; None: where stdout is a terminal.
        shown: False on the ranks that are silent.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        *,
        log_interval: int,
        throughput: bool = False,
        live: bool | None = None,
        shown: bool = True,
    ) -> None:
        self._total_steps, self._log_interval = total_steps, log_interval
        self._throughput, self._shown = throughput, shown
        self._waiting: list[StepRecord] = []
        self._stack = ExitStack()
        live = shown and (sys.stdout.isatty() if live is None else live)
        self._bar = TrainProgress(total_steps, start_step, throughput=throughput) if live else None

    def step(self, record: StepRecord) -> None:
        """Show a step: at once on the bar, every `log_interval` steps (and at the end) as a line."""
        if self._bar is not None:
            self._bar.update(record)
            return
        self._waiting.append(record)
        if record.step % self._log_interval == 0 or record.step == self._total_steps:
            self._show_waiting()

    def _show_waiting(self) -> None:
        """A line of the steps that have none yet."""
        if self._waiting:
            self.message(step_line(self._waiting, self._total_steps, throughput=self._throughput))
            self._waiting.clear()

    def valid(self, record: ValidRecord) -> None:
        """Show an evaluation."""
        self.message(valid_line(record))

    def message(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.message(text)
        elif self._shown:
            say(text)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._show_waiting()  # a run may end between two lines
        self._stack.close()
