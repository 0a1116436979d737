"""The page: every part of every run put into one HTML file that needs nothing else.

Charts are SVG drawn here, so the page works from a disk, on paper and without scripts; its one small script
only reads out values under the pointer. (plotly.js would add 4.5 MB and need a script to show anything.)
Every text from a file passes jinja2's escaping, and a content policy forbids the page to load anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import redline
from redline.choice import Choice
from redline.doctor import Finding, phrases
from redline.errors import TrainingError
from redline.files import os_errors_as, write_text_atomic
from redline.report.doctor_text import gain_text
from redline.report.html.compare import ABSENT, Beside, beside, differences
from redline.report.html.curves import Chart, charts_of
from redline.report.html.fp8 import Fp8Tables, fp8_of
from redline.report.html.headline import Figure, headline
from redline.report.html.memory import Memory, memory_of
from redline.report.html.roofline import Roofline, roofline_of
from redline.report.html.runs import RunData, facts_of_run
from redline.report.html.values import objects, plural, points, share, shown
from redline.report.html.waterfall import Bar, Waterfall, side_by_side, waterfall_of
from redline.units import format_bytes, format_count, format_flops_per_s

LANGUAGE = "en"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """Everything the page says of one run; None for what its folder does not hold."""

    run: RunData
    figures: Sequence[Figure]
    waterfall: Waterfall | None
    roofline: Roofline | None
    memory: Memory | None
    fp8: Fp8Tables | None
    choices: Sequence[Choice]
    facts: Sequence[tuple[str, str]]
    findings: Sequence[tuple[Finding, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole report; all but the first two are empty for a single run.

    Attributes:
        half_stated: what only some of the runs state, and may be equal all the same.
    """

    runs: Sequence[RunPart]
    charts: Sequence[Chart]
    beside: Sequence[Beside]
    differences: Sequence[tuple[str, list[str]]]
    half_stated: Sequence[tuple[str, list[str]]]
    causes: Sequence[tuple[str, str, list[Bar | None]]]

    @property
    def title(self) -> str:
        """The runs by name."""
        return " against ".join(part.run.label for part in self.runs)


def make_page(runs: Sequence[RunData], price: float | None = None) -> Page:
    """Everything that will stand on the page.

    Args:
        price: of a GPU and hour, in any currency; None for no cost.
    """
    parts = [_part(run, price) for run in runs]
    several = len(runs) > 1
    falls = {part.run.label: part.waterfall for part in parts if part.waterfall is not None}
    differing = differences(runs) if several else []
    return Page(
        runs=parts,
        charts=charts_of(runs),
        beside=beside([part.figures for part in parts]) if several else [],
        differences=[row for row in differing if ABSENT not in row[1]],
        half_stated=[row for row in differing if ABSENT in row[1]],
        causes=side_by_side(falls) if several else [],
    )


def _part(run: RunData, price: float | None) -> RunPart:
    account, diagnosis = run.account, run.diagnosis
    say = phrases(LANGUAGE)
    findings = diagnosis.findings if diagnosis is not None else ()
    return RunPart(
        run=run,
        figures=headline(run, price),
        waterfall=None if account is None else waterfall_of(account, diagnosis, run.record.step_s),
        roofline=None if account is None else roofline_of(account),
        memory=memory_of(run),
        fp8=fp8_of(run),
        choices=[_choice(each) for each in objects(run.summary.get("choices"))],
        facts=facts_of_run(run),
        findings=[(finding, gain_text(finding, say)) for finding in findings],
    )


def _choice(values: Mapping[str, object]) -> Choice:
    return Choice(*(str(values.get(name, "")) for name in ("what", "asked", "ran", "why")))


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("redline.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "count": format_count,
        "rate": format_flops_per_s,
        "points": points,
        "shown": shown,
        "plural": plural,
        "share": share,
    }
    text = environment.get_template("page.html").render(page=page, version=redline.__version__)
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair, in a path or out of JSON


def write_page(path: Path, page: Page) -> None:
    """Render and write the file, atomically.

    Raises: TrainingError when it cannot be written.
    """
    text = render(page)
    with os_errors_as(TrainingError, path, "write"):
        write_text_atomic(path, text)
