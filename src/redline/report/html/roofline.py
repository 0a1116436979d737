"""The roofline: every operator's FLOP/s over its FLOPs a byte, below what the device's limits allow.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52 (4), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from redline.ledger import OperatorRow, StepAccount
from redline.report.html.axes import SIZE, Axis, Tick, log_axis
from redline.units import format_flops_per_s

ROWS = 24  # operators in the table
WITHOUT_FLOPS = (
    "cast",
    "copy",
    "collective",
)  # move data, though the operator that launches them may compute
NUMBERED = 9  # dots that carry the number of their row
DOTS = 60
KINDS = ("gemm", "attention", "norm", "activation", "loss", "optimizer")  # with a color; the others share one


@dataclass(frozen=True, slots=True)
class Dot:
    """An operator, at percents of the plot; `row` is its number in the table, 0 for none."""

    x: float
    y: float
    row: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The plot, and the table of operators, which holds also those that the plot cannot place.

    Attributes:
        roof: SVG path of the limits; "" where neither is known.
        lacking: what is not known of the device, in a line; "" when both limits are.
        left_out: operators below the table.
    """

    roof: str
    dots: Sequence[Dot]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    rows: Sequence[OperatorRow]
    lacking: str
    left_out: int
    said: str


def roofline_of(account: StepAccount) -> Roofline | None:
    """The plot of an account; None where it holds no operators."""
    rows = sorted(map(_own_work, account.operators), key=lambda row: -row.ms)
    if not rows:
        return None
    reference = account.reference
    peak, bandwidth = reference.peak_flops_per_s, reference.bandwidth_bytes_per_s
    placed = [
        (number, row)
        for number, row in enumerate(rows, 1)
        if (row.flops or 0) > 0 and (row.bytes or 0) > 0 and (row.flops_per_s or 0) > 0
    ][:DOTS]
    x, y = _axes(placed, peak, bandwidth)
    return Roofline(
        roof=_roof(x, y, peak, bandwidth),
        dots=[_dot(number, row, x, y) for number, row in reversed(placed)],
        x_ticks=x.ticks,
        y_ticks=[replace(tick, text=format_flops_per_s(tick.value)) for tick in y.ticks],
        rows=rows[:ROWS],
        lacking=_lacking(peak, bandwidth, reference.dtype),
        left_out=max(0, len(rows) - ROWS),
        said=f"{len(placed)} operators by FLOPs a byte and FLOP/s; the table below has their numbers.",
    )


def _own_work(row: OperatorRow) -> OperatorRow:
    """Without the FLOPs that belong to another kernel of the same operator.

    A matrix product that clears its workspace first is two rows under one name, which a ledger may both
    credit with the product: the memset of microseconds would stand thousands of times above the peak.
    """
    if row.kind not in WITHOUT_FLOPS or not row.flops:
        return row
    return replace(row, flops=None, flops_per_s=None, of_peak=None, bytes_per_s=None, of_bandwidth=None)


def _intensity(row: OperatorRow) -> float:
    assert row.flops is not None and row.bytes is not None
    return row.flops / row.bytes


def _axes(
    placed: Sequence[tuple[int, OperatorRow]], peak: float | None, bandwidth: float | None
) -> tuple[Axis, Axis]:
    """Whole decades around the dots, the peak and the ridge."""
    xs = [_intensity(row) for _, row in placed]
    ys = [row.flops_per_s for _, row in placed if row.flops_per_s]
    if peak:
        ys.append(peak)
        if bandwidth:
            xs.append(peak / bandwidth)
    y = log_axis(ys or [1e9], whole=True)
    return log_axis(xs or [1.0], whole=True), replace(y, high=1.5 * max(ys, default=y.high))


def _roof(x: Axis, y: Axis, peak: float | None, bandwidth: float | None) -> str:
    """Up along the bandwidth to the ridge, then level at the peak; only what is known of it."""

    def at(intensity: float, rate: float) -> str:
        return f"{SIZE * x.place(intensity):.1f} {SIZE * (1 - y.place(rate)):.1f}"

    if peak and bandwidth:
        ridge = peak / bandwidth
        return f"M{at(x.low, x.low * bandwidth)}L{at(ridge, peak)}L{at(x.high, peak)}"
    if peak:
        return f"M{at(x.low, peak)}L{at(x.high, peak)}"
    return f"M{at(x.low, x.low * bandwidth)}L{at(x.high, x.high * bandwidth)}" if bandwidth else ""


def _dot(number: int, row: OperatorRow, x: Axis, y: Axis) -> Dot:
    assert row.flops_per_s is not None
    where = " ".join(filter(None, (row.name, row.phase, row.role)))
    text = (
        f"{where}: {row.ms:.3g} ms, {format_flops_per_s(row.flops_per_s)}, {_intensity(row):.3g} FLOPs a byte"
    )
    return Dot(
        round(100 * x.place(_intensity(row)), 2),
        round(100 * y.place(row.flops_per_s), 2),
        number if number <= NUMBERED else 0,
        row.kind if row.kind in KINDS else "other",
        text,
    )


def _lacking(peak: float | None, bandwidth: float | None, dtype: str) -> str:
    unknown = [
        name for name, limit in ((f"{dtype} peak", peak), ("memory bandwidth", bandwidth)) if not limit
    ]
    return (
        f"The device's {' and '.join(unknown)} is not known, so that limit is not drawn." if unknown else ""
    )
