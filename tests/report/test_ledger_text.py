"""The account as text: eight lines, and the tables."""

import io

import pytest
from rich.console import Console

from redline.ledger import Reference, Spread, StepAccount
from redline.ledger.causes import make_losses
from redline.report import print_account, waterfall_view
from redline.report.ledger_text import waterfall_rows

MS = {"gemm": 20.0, "attention": 10.0, "norm": 5.0, "dp": 4.0, "recompute": 3.0, "launch": 2.0, "data": 1.0,
      "unknown": 0.5}  # fmt: skip


def account(ms: dict, ideal: float | None = 54.5, **values: object) -> dict:
    wall = sum(ms.values()) + (ideal or 0.0)
    return StepAccount(
        reference=Reference(dtype="bf16", peak_flops_per_s=989e12 if ideal else None),
        steps=(5, 6), wall_ms=wall, ideal_ms=ideal, mfu=ideal and ideal / wall,
        losses=make_losses(ms, wall, ideal_known=ideal is not None), operators=(), modules=(), **values,
    ).as_dict()  # fmt: skip


def printed(view: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(view)
    return console.file.getvalue()


def test_the_waterfall_takes_eight_lines_that_add_up() -> None:
    rows = waterfall_rows(account(MS))
    assert len(rows) == 8
    assert rows[0][1] == "peak: 989 TFLOP/s bf16" and rows[1][:2] == ("-20.0", "matrix products below peak")
    assert rows[-2][1] == "3 smaller causes" and rows[-1][:2] == ("54.5%", "MFU")
    assert 100 + sum(float(row[0]) for row in rows[1:-1]) == pytest.approx(54.5, abs=0.3)


def test_few_causes_take_few_lines_and_no_peak_means_shares_of_the_time() -> None:
    assert len(waterfall_rows(account({"gemm": 1.0, "unknown": 0.0}, 1.0))) == 3
    rows = waterfall_rows(account({"gemm": 3.0, "launch": 1.0}, None))
    assert [row[:2] for row in rows] == [
        ("100.0%", "the step"), ("-75.0", "matrix products"), ("-25.0", "launch gaps")
    ]  # fmt: skip


def test_it_says_what_it_accounts_for() -> None:
    text = printed(waterfall_view(account(MS, overhead=0.031)))
    assert "where the time of steps 5-6 went (100 ms each, +3.1% under the profiler)" in text
    assert "RL012 RL101" in text


def test_below_it_stand_the_uneven_rank_and_the_ordinary_step() -> None:
    """Not in the eight lines, which they would break."""
    uneven = (
        Spread(key="wall", mean_ms=100.0, worst_ms=190.0, worst_rank=0, skew=0.9),
        Spread(key="dp", mean_ms=4.0, worst_ms=7.0, worst_rank=1, skew=0.75),
    )
    slowed = account(MS, overhead=0.25, spread=uneven)
    slowed["reference"]["step_ms"] = 80.0
    assert len(waterfall_rows(slowed)) == 8 and waterfall_rows(slowed)[-1][1] == "MFU"
    text = " ".join(printed(waterfall_view(slowed)).split())
    assert "rank 1 has 3 ms more of" in text and "of dp than" not in text
    assert "an ordinary step, of 80 ms, has an MFU of 68.1%" in text
    assert "ordinary" not in printed(waterfall_view(account(MS, overhead=0.01)))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_whole_account_prints_at_any_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    print_account(account(MS), console)
    text = console.file.getvalue()
    assert "unknown" in text and all(len(line) <= width for line in text.splitlines())
