"""The timings of fused operators as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from redline.report.text import new_table

NONE = "-"


def print_kernels(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the rows of `redline bench kernels`: one line a provider; the fastest of a case is green."""
    table = new_table("fused operators")
    table.add_column("operator", overflow="fold")
    table.add_column("by")
    for header in ("fwd us", "TB/s", "of copy", "fwd+bwd us", "TB/s", "of copy", "TFLOP/s", "host us"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_section()
        name, gate = f"{row['op']} {row['case']}", row["gate"]
        if not gate["passed"]:
            why = f"wrong: {gate['where']}, {gate['worst']:.2f} times the error it may have"
            table.add_row(name, Text(why, "red"))
        times = {by: found.get("both_s", found.get("forward_s")) for by, found in row["providers"].items()}
        best = min((time for time in times.values() if time is not None), default=None)
        for by, found in row["providers"].items():
            if "error" in found:
                table.add_row(name, by, Text(found["error"], "dim", overflow="ellipsis", no_wrap=True))
            else:
                fastest = "green" if times[by] == best else ""
                table.add_row(name, Text(by, fastest), *_cells(found))
            name = ""
    (console or Console()).print(table)


def _cells(found: Mapping[str, Any]) -> list[str]:
    def cell(key: str, factor: float, form: str) -> str:
        value = found.get(key)
        return NONE if value is None else format(value * factor, form)

    return [
        cell("forward_s", 1e6, ",.1f"),
        cell("forward_bytes_per_s", 1e-12, ".2f"),
        cell("forward_share_of_copy", 1, ".0%"),
        cell("both_s", 1e6, ",.1f"),
        cell("both_bytes_per_s", 1e-12, ".2f"),
        cell("both_share_of_copy", 1, ".0%"),
        cell("flops_per_s", 1e-12, ",.0f"),
        cell("host_s", 1e6, ".1f"),
    ]
