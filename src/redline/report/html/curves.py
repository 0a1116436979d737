"""Curves over the steps of one run or several: thinned to what a screen can show, as SVG paths with tables.

A run may have a million steps. A curve of more than BUCKETS is drawn as the means of that many stretches,
with a pale band from the least to the greatest value of each, so that no spike is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.report.html.axes import SIZE, Axis, Tick, linear_axis, log_axis
from redline.report.html.runs import RunData
from redline.report.html.values import number, shown

BUCKETS = 400
ROWS = 16  # of the table beside a chart
LOG_FROM = 30.0  # a measure that spans more is drawn by decades
MARK = 45.0  # height of a tick mark at the edge of a plot


@dataclass(frozen=True, slots=True)
class Point:
    """A stretch of steps: the means of step number and value, the least and the greatest value."""

    step: float
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve: its name, its number in the palette, its points; None where it is broken."""

    name: str
    color: int
    points: Sequence[Point | None]
    dots: bool = False

    @property
    def real(self) -> list[Point]:
        """The points that there are."""
        return [point for point in self.points if point is not None]


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps at which something happened: short lines at an edge of the plot."""

    name: str
    kind: str
    steps: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve as the page draws it: SVG paths in a square of SIZE."""

    name: str
    color: int
    line: str
    band: str
    dots: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart and its text alternatives.

    Attributes:
        said: in a sentence, for those who do not see it.
        header, rows: the table: some of the points, the first and the last among them.
        data: what the page's script reads out under the pointer.
    """

    id: str
    title: str
    unit: str
    said: str
    curves: Sequence[Curve]
    marks: Sequence[tuple[str, str, str]]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that is recorded each step: the key, how it is called, its unit."""

    key: str
    title: str
    unit: str
    from_zero: bool = False
    read: Callable[[Mapping[str, Any], str], float | None] = lambda record, key: number(record.get(key))


def _percent(record: Mapping[str, Any], key: str) -> float | None:
    value = number(record.get(key))
    return None if value is None else 100 * value


def _gib(record: Mapping[str, Any], key: str) -> float | None:
    value = number(record.get(key))
    return None if value is None else value / 2**30


def _ms(record: Mapping[str, Any], key: str) -> float | None:
    value = number(record.get(key))
    return None if value is None else 1e3 * value


LOSS = Measure("loss", "Loss", "nats a token")
THROUGHPUT = Measure("tokens_per_s", "Throughput", "tokens/s", from_zero=True)
PLAIN = (
    Measure("grad_norm", "Gradient norm", "before clipping"),
    Measure("lr", "Learning rate", "", from_zero=True),
    THROUGHPUT,
    Measure("mfu", "MFU", "% of peak, attention causal-half", from_zero=True, read=_percent),
    Measure("data_wait_s", "Wait for data", "ms", from_zero=True, read=_ms),
    Measure("memory_now", "Memory after the step", "GiB", from_zero=True, read=_gib),
)
# Keys of a step's record that have a chart, or none because they say the same as another or only count up.
KNOWN = {"kind", "step", "step_time_s", "memory", "consumed_samples", "flops_per_s", "skipped", "nonfinite",
         "profiled", LOSS.key, *(each.key for each in PLAIN)}  # fmt: skip


def charts_of(runs: Sequence[RunData]) -> list[Chart]:
    """Every chart for which a run has values: loss, the usual measures, and whatever else was recorded."""
    charts = [_loss(runs)]
    charts += [_measured(runs, measure) for measure in (*PLAIN, *_further(runs))]
    return [chart for chart in charts if chart is not None]


def _further(runs: Sequence[RunData]) -> Iterator[Measure]:
    """What some runs record beside the usual: norms, counts, fp8 statistics; constants are left out."""
    keys = dict.fromkeys(key for run in runs for record in run.steps for key in record if key not in KNOWN)
    for key in keys:
        found = {number(record.get(key)) for run in runs for record in run.steps}
        if len(found - {None}) > 1:
            yield Measure(key, key.replace("_", " "), "")


def _loss(runs: Sequence[RunData]) -> Chart | None:
    """Training loss as a line, validation as dots in the same color family."""
    alone, series = len(runs) == 1, []
    for place, run in enumerate(runs):
        prefix = "" if alone else f"{run.label}: "
        series.append(Series(name=f"{prefix}training", color=place, points=points_of(run.steps, LOSS)))
        if run.valid:
            color = 1 if alone else place
            valid = points_of(run.valid, LOSS)
            series.append(Series(name=f"{prefix}validation", color=color, points=valid, dots=True))
    return draw(LOSS.key, LOSS.title, LOSS.unit, series, step_axis(runs), _troubles(runs[0]) if alone else ())


def _measured(runs: Sequence[RunData], measure: Measure) -> Chart | None:
    alone = len(runs) == 1
    series = [
        Series(
            name=measure.title if alone else run.label,
            color=place,
            points=points_of([each for each in run.steps if measure.key in each], measure),
        )
        for place, run in enumerate(runs)
    ]
    marks: Sequence[Marks] = ()
    if alone and measure is THROUGHPUT:
        profiled = [float(each["step"]) for each in runs[0].steps if each.get("profiled")]
        evaluated = [float(each["step"]) for each in runs[0].valid]
        marks = (
            Marks("evaluation", "evaluation", evaluated),
            Marks("checkpoint", "checkpoint", runs[0].checkpoints),
            Marks("profiled", "profiled", profiled),
        )
    return draw(
        measure.key, measure.title, measure.unit, series, step_axis(runs), marks, from_zero=measure.from_zero
    )


def _troubles(run: RunData) -> Sequence[Marks]:
    skipped = [float(each["step"]) for each in run.steps if each.get("skipped") or each.get("nonfinite")]
    return (Marks("skipped or not finite", "skipped", skipped),)


def points_of(records: Sequence[Mapping[str, Any]], measure: Measure) -> list[Point | None]:
    """A measure over the records, at most BUCKETS points; None for a stretch without a finite value."""
    per_bucket = max(1, -(-len(records) // BUCKETS))
    return [
        _bucket(records[start : start + per_bucket], measure) for start in range(0, len(records), per_bucket)
    ]


def _bucket(records: Sequence[Mapping[str, Any]], measure: Measure) -> Point | None:
    found = [(float(each["step"]), measure.read(each, measure.key)) for each in records]
    values = [value for _, value in found if value is not None]
    if not values:
        return None
    steps = [step for step, value in found if value is not None]
    return Point(sum(steps) / len(steps), sum(values) / len(values), min(values), max(values))


def draw(
    id: str,
    title: str,
    unit: str,
    series: Sequence[Series],
    steps: Axis,
    marks: Sequence[Marks] = (),
    *,
    from_zero: bool = False,
) -> Chart | None:
    """The chart over an axis of `steps`; None where no series has a value."""
    series = [each for each in series if each.real]
    if not series:
        return None
    points = [point for each in series for point in each.real]
    lows, highs = [point.low for point in points], [point.high for point in points]
    by_decades = not from_zero and min(lows) > 0 and max(highs) / min(lows) > LOG_FROM
    y = log_axis([*lows, *highs]) if by_decades else linear_axis([*lows, *highs], from_zero=from_zero)
    marks = [each for each in marks if each.steps]
    header, rows = _table(series)
    return Chart(
        id=id,
        title=title,
        unit=unit + (", log scale" if by_decades and unit else "log scale" if by_decades else ""),
        said=". ".join(map(_sentence, series)) + ".",
        curves=[_curve(each, steps, y) for each in series],
        marks=[(each.name, each.kind, _mark_path(each, steps)) for each in marks],
        x_ticks=steps.ticks,
        y_ticks=y.ticks,
        header=header,
        rows=rows,
        data={
            "low": steps.low,
            "high": steps.high,
            "series": [
                {"name": each.name, "points": [(_rounded(p.step), _rounded(p.value)) for p in each.real]}
                for each in series
            ],
        },
    )


def step_axis(runs: Sequence[RunData]) -> Axis:
    """From the first step of any run to the last."""
    low = min(float(run.steps[0]["step"]) for run in runs)
    high = max(float(run.steps[-1]["step"]) for run in runs)
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def _curve(series: Series, x: Axis, y: Axis) -> Curve:
    def at(step: float, value: float) -> str:
        return f"{SIZE * x.place(step):.1f} {SIZE * (1 - y.place(value)):.1f}"

    line, pen = [], "M"
    for point in series.points:
        if point is not None:
            line.append(f"{pen}{at(point.step, point.value)}")
            pen = "L"
        elif not series.dots:
            pen = "M"
    real = series.real
    dotted = real if series.dots else _lonely(series.points)
    return Curve(
        name=series.name,
        color=series.color % 6,
        line="".join(line),
        band=_band(real, at) if any(point.high > point.low for point in real) else "",
        dots="".join(f"M{at(point.step, point.value)}h0" for point in dotted),
    )


def _lonely(points: Sequence[Point | None]) -> list[Point]:
    """Points that no line would show, with nothing on either side."""
    around = zip([None, *points], points, [*points[1:], None], strict=False)
    return [
        point for before, point, after in around if point is not None and before is None and after is None
    ]


def _band(points: Sequence[Point], at: Callable[[float, float], str]) -> str:
    there = [at(point.step, point.high) for point in points]
    back = [at(point.step, point.low) for point in reversed(points)]
    return f"M{'L'.join([*there, *back])}Z"


def _mark_path(marks: Marks, x: Axis) -> str:
    """Checkpoints hang from the top, everything else stands on the bottom."""
    start, height = (0.0, MARK) if marks.kind == "checkpoint" else (SIZE, -MARK)
    return "".join(f"M{SIZE * x.place(step):.1f} {start:.0f}v{height:.0f}" for step in marks.steps)


def _sentence(series: Series) -> str:
    real = series.real
    first, last = real[0], real[-1]
    least = min(point.low for point in real)
    greatest = max(point.high for point in real)
    return (
        f"{series.name}: {shown(first.value)} at step {first.step:.0f}, {shown(last.value)} at step "
        f"{last.step:.0f}, between {shown(least)} and {shown(greatest)}"
    )


def _table(series: Sequence[Series]) -> tuple[list[str], list[list[str]]]:
    """Step and value of every series, thinned: of each the nearest point to some steps of the first."""
    lead = max(series, key=lambda each: len(each.real)).real
    places = sorted({round(place * (len(lead) - 1) / max(1, ROWS - 1)) for place in range(ROWS)})
    steps = [lead[place].step for place in places]
    rows = [[f"{step:,.0f}", *(_at(each, step, steps) for each in series)] for step in steps]
    return ["step", *(each.name for each in series)], rows


def _at(series: Series, step: float, steps: Sequence[float]) -> str:
    """The value nearest to a step, where one is nearer to it than to the other steps."""
    nearest = min(series.real, key=lambda point: abs(point.step - step))
    home = min(steps, key=lambda other: abs(nearest.step - other))
    return shown(nearest.value) if home == step else ""


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
