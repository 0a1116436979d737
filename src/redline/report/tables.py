"""What all tables look like."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text


def new_table(title: str) -> Table:
    """An empty table in the style of all reports."""
    return Table(
        title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
