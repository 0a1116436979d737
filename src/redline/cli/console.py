"""The console that reports are printed on."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class ReportConsole(Console):
    """rich's Console, without its own way out when the reader has gone (`| head`): rich would exit with 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `cli.main`, which takes it for what it is: somebody has read enough."""
        raise BrokenPipeError
