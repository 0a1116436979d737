"""What casts to fp8 lost, by layer: the tables of fp8.jsonl, the newest whole and the worst over the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.report.html.runs import RunData
from redline.report.html.values import number

OPERANDS = {"x": "input", "w": "weight", "dy": "gradient"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One operand of one GEMM in one step; None for a number that is not finite (scales of blocks are many).

    Attributes:
        saturated, underflowed: shares of its values that were cut off, and that became 0.
    """

    layer: str
    gemm: str
    operand: str
    step: int
    amax: float | None
    scale: float | None
    saturated: float
    underflowed: float

    @property
    def where(self) -> str:
        """Layer and step, as a row of several layers and steps cites them."""
        return f"layer {self.layer}, step {self.step:,}" if self.layer else f"step {self.step:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The same operand of the same GEMM in all layers, over all tables.

    Attributes:
        amax: the largest.
        scales: the least and the largest; None where none is known.
        saturated, underflowed: where the share was largest.
    """

    gemm: str
    operand: str
    amax: float | None
    scales: tuple[float, float] | None
    saturated: Cell
    underflowed: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tables:
    """Groups over the run, and the rows of its newest table, layer by layer."""

    step: int
    count: int
    groups: Sequence[Group]
    rows: Sequence[Cell]


def fp8_of(run: RunData) -> Fp8Tables | None:
    """Of fp8.jsonl; None where the run wrote none (`--fp8-stats-interval`)."""
    cells = [cell for record in run.fp8 if (cell := _cell(record)) is not None]
    if not cells:
        return None
    last = max(cell.step for cell in cells)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.gemm, cell.operand), []).append(cell)
    return Fp8Tables(
        step=last,
        count=len({cell.step for cell in cells}),
        groups=[_group(*key, found) for key, found in groups.items()],
        rows=[cell for cell in cells if cell.step == last],
    )


def _cell(record: Mapping[str, Any]) -> Cell | None:
    """A record with the names and shares that make it one; None for any other."""
    step, site, operand = number(record.get("step")), record.get("site"), record.get("operand")
    saturated, underflowed = number(record.get("saturated")), number(record.get("underflowed"))
    if step is None or saturated is None or underflowed is None:
        return None
    words = str(site).split(".", 2)
    layer, gemm = words[1:] if len(words) == 3 and words[0] == "layers" else ("", str(site))
    return Cell(
        layer=layer,
        gemm=gemm,
        operand=OPERANDS.get(str(operand), str(operand)),
        step=int(step),
        amax=number(record.get("amax")),
        scale=number(record.get("scale")),
        saturated=saturated,
        underflowed=underflowed,
    )


def _group(gemm: str, operand: str, cells: Sequence[Cell]) -> Group:
    scales = _known(cell.scale for cell in cells)
    return Group(
        gemm=gemm,
        operand=operand,
        amax=max(_known(cell.amax for cell in cells), default=None),
        scales=(min(scales), max(scales)) if scales else None,
        saturated=max(cells, key=lambda cell: cell.saturated),
        underflowed=max(cells, key=lambda cell: cell.underflowed),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
