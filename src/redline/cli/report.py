"""`redline report`: one self-contained HTML page of a run, or of several side by side."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from redline.cli.parser import Parser
from redline.errors import RedlineError, UsageError

if TYPE_CHECKING:
    from redline.report.html import RunData

USAGE = """\
redline report RUN_DIR [RUN_DIR ...] [-o FILE] [--price-per-gpu-hour PRICE] [--open]

Writes RUN_DIR/report.html: where the MFU went, curves, memory, choices, findings, in one file that needs no
network. Of several runs, a comparison: compare.html in the first one's folder."""
EPILOG = """\
examples:
  redline report runs/mine --price-per-gpu-hour 2.50
  redline report runs/before runs/after -o before-after.html"""
ONE, SEVERAL = "report.html", "compare.html"


def main(argv: Sequence[str]) -> int:
    """Write the page; returns the exit code, raises RedlineError."""
    asked = _parser().parse(list(argv))
    from redline.report.html import make_page, read_runs, write_page

    runs = [_examined(run) for run in read_runs(asked.runs)]
    target = _target(asked.output, runs[0].folder / (ONE if len(runs) == 1 else SEVERAL))
    write_page(target, make_page(runs, asked.price_per_gpu_hour))
    print(f"report: {target}")
    if asked.open:
        import webbrowser

        webbrowser.open(target.resolve().as_uri())
    return 0


def _parser() -> Parser:
    parser = Parser("redline report", usage=USAGE, epilog=EPILOG)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run")
    add("-o", "--output", type=Path, metavar="FILE", help="write this file instead")
    add(
        "--price-per-gpu-hour",
        type=_price,
        metavar="PRICE",
        help="of one GPU and hour, in any currency: adds the cost of a billion tokens",
    )
    add("--open", action="store_true", help="show the page in a browser")
    return parser


def _price(word: str) -> float:
    try:
        price = float(word)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is no price above 0")
    return price


def _target(named: Path | None, default: Path) -> Path:
    target = default if named is None else named
    if target.is_dir():
        raise UsageError(f"-o {target} is a folder.", "the report is one file.", "name a file in it.")
    if not target.parent.is_dir():
        raise UsageError(
            f"-o {target}: there is no folder {target.parent}.",
            "a report makes no folders.",
            "make it first, or name another file.",
        )
    return target


def _examined(run: RunData) -> RunData:
    """The run with the doctor's diagnosis, or with the reason why there is none."""
    from redline.cli.doctor import case_of_run
    from redline.doctor import diagnose

    if not run.options:
        return replace(run, undiagnosed="The doctor needs the run's config.toml.")
    try:
        return replace(run, diagnosis=diagnose(case_of_run(run.folder)))
    except RedlineError as error:
        return replace(
            run, undiagnosed=f"The doctor cannot examine this run: {error.what} {error.why}".strip()
        )
