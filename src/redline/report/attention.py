"""The timings of attention backends as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from redline.report.tables import new_table


def print_attention(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the rows of `redline bench attention`: a line a backend, the fastest of a shape in green.

    Why a backend has no figures is said below the table, once.
    """
    table = new_table("attention")
    table.add_column("shape", overflow="fold", min_width=16)
    table.add_column("by", no_wrap=True)
    for header in ("fwd ms", "TFLOP/s", "bwd ms", "TFLOP/s", "auto"):
        table.add_column(header, justify="right", no_wrap=True)
    notes: dict[str, None] = {}
    for row in rows:
        table.add_section()
        name = row["case"]
        timed = {by: each for by, each in row["backends"].items() if "forward_s" in each}
        best = min(timed, key=lambda by: timed[by]["forward_s"] + timed[by]["backward_s"], default=None)
        for by, each in row["backends"].items():
            if by in timed:
                cells = [f"{each[key] * factor:,.3g}" for key, factor in _COLUMNS]
                chosen = "*" if row["auto"].get("ran") == by else ""
                table.add_row(name, Text(by, "green" if by == best else ""), *cells, chosen)
                name = ""
            else:
                gate = each.get("gate", {"passed": True})
                wrong = f"{row['case']}: wrong: {gate['where']}" if not gate["passed"] else ""
                notes[f"{by}: {wrong or each.get('error', 'not timed')}"] = None
    console = console or Console()
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


_COLUMNS = (
    ("forward_s", 1e3),
    ("forward_flops_per_s", 1e-12),
    ("backward_s", 1e3),
    ("backward_flops_per_s", 1e-12),
)
