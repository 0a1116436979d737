"""The live display of a training run on a terminal: bar, step, loss, tokens/s, MFU, memory, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from redline.ledger import StepRecord
from redline.units import format_bytes, format_count, format_flops_per_s

# Columns that bar, step counter and time left need beside the facts.
RESERVED = 44


class TrainProgress:
    """A progress bar over the steps of a run. Use as a context manager; `update` after each step.

    What does not fit the terminal's width is left out, the least important first.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        console: Console | None = None,
        *,
        throughput: bool = False,
    ) -> None:
        self.console = console or Console()
        self._throughput = throughput
        self._progress = Progress(
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            console=self.console,
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("starting", total=total_steps, completed=start_step)

    def update(self, record: StepRecord) -> None:
        """Show this step."""
        facts = fit_facts(record, self.console.width - RESERVED, throughput=self._throughput)
        self._progress.update(self._task, completed=record.step, description=facts)

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> TrainProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def fit_facts(record: StepRecord, width: int, *, throughput: bool = False) -> str:
    """What to say of a step in about `width` columns; the loss always, FLOP/s where `throughput` asks."""
    facts = [f"loss {record.loss:.4f}", f"{format_count(record.tokens_per_s)} tok/s"]
    if throughput and record.flops_per_s is not None:
        facts.append(format_flops_per_s(record.flops_per_s))
    if record.mfu is not None:
        facts.append(f"MFU {record.mfu:.1%}")
    facts.append(format_bytes(record.memory))
    while len(facts) > 1 and len("  ".join(facts)) > width:
        facts.pop()
    return "  ".join(facts)
