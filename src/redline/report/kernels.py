"""The timings of fused operators as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from redline.report.tables import new_table
from redline.units import format_bytes

NONE = "-"


def print_kernels(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the rows of `redline bench kernels`: one line a provider; the fastest of a case is green.

    "both" is forward and backward; "copy" the share of a device-to-device copy's rate that the bytes reach;
    "host" is what an eager forward costs the host on tensors without rows, and with one. Below the table
    stands what each provider allocates beyond its inputs where arithmetic is the limit (the head and loss),
    who was ahead of the fused operator by more than chance, why a provider has no figures, and whose host was
    never ahead of the device.
    """
    table = new_table("fused operators")
    table.add_column("operator", overflow="fold", min_width=16)
    table.add_column("by", no_wrap=True)
    for header in ("fwd us", "copy", "both us", "copy", "TFLOP/s", "host us", "1 row"):
        table.add_column(header, justify="right", no_wrap=True)
    notes: dict[str, None] = {}  # in order, each once
    for row in rows:
        table.add_section()
        name, gate = f"{row['op']} {row['case']}", row["gate"]
        if not gate["passed"]:
            table.add_row(name, Text("wrong", "red"))
            notes[f"{name}: {gate['where']} has {gate['worst']:.2f} times the error it may have"] = None
        found = {by: rates for by, rates in row["providers"].items() if "error" not in rates}
        notes |= dict.fromkeys(
            f"{by}: {rates['error']}" for by, rates in row["providers"].items() if by not in found
        )
        notes |= dict.fromkeys(
            f"{name}: the host was late in every sample of {by}'s {' and '.join(rates['late'])}:"
            " gaps between kernels are part of its time"
            for by, rates in found.items()
            if rates.get("late")
        )
        notes |= dict.fromkeys(
            f"{name}: ahead of fused, {what}: {', '.join(ahead)}"
            for what, ahead in row.get("ahead", {}).items()
            if ahead
        )
        if any("flops_per_s" in rates for rates in found.values()):
            held = (
                f"{by} {format_bytes(rates['workspace_bytes'])}"
                for by, rates in found.items()
                if "workspace_bytes" in rates
            )
            notes[f"{name}: most memory beyond the inputs: {', '.join(held)}"] = None
        times = {by: rates.get("both_s", rates.get("forward_s")) for by, rates in found.items()}
        best = min((time for time in times.values() if time is not None), default=None)
        for by, rates in found.items():
            table.add_row(name, Text(by, "green" if times[by] == best else ""), *_cells(rates))
            name = ""
    console = console or Console()
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _cells(rates: Mapping[str, Any]) -> list[str]:
    def cell(key: str, factor: float, form: str) -> str:
        value = rates.get(key)
        return NONE if value is None else format(value * factor, form)

    return [
        cell("forward_s", 1e6, ",.0f"),
        cell("forward_share_of_copy", 1, ".0%"),
        cell("both_s", 1e6, ",.0f"),
        cell("both_share_of_copy", 1, ".0%"),
        cell("flops_per_s", 1e-12, ",.0f"),
        cell("host_s", 1e6, ".0f"),
        cell("host_one_row_s", 1e6, ".0f"),
    ]
