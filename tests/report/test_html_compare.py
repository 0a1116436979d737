"""The page of several runs: what differs, curves on each other, waterfalls side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import LOST_MS, OPTIONS, account_of, make_run
from read_page import Node, read_page

from redline.errors import UsageError
from redline.report.html import make_page, read_runs, render
from redline.report.html.runs import unique_labels


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Node:
    root = tmp_path_factory.mktemp("runs")
    before = make_run(root / "before")
    after = make_run(
        root / "after",
        rate=39_600.0,
        steps=80,
        options=OPTIONS.replace("micro_batch_size = 1", "micro_batch_size = 2") + "[optim]\nlr = 0.001\n",
        summary={"versions": {"redline": "0.1.0", "torch": "2.12.0"}},
    )
    bare = make_run(root / "bare", ledger=False)
    return read_page(render(make_page(read_runs([before, after, bare]), 2.0)))


def test_headlines_side_by_side(page: Node) -> None:
    rows = {row[0]: row[1:] for row in page.one("table", class_="beside").rows()}
    assert rows["Measure"] == ["before", "after", "bare"]
    assert rows["Tokens/s"] == ["36,000", "39,600 +10.0%", "36,000 +0.0%"]
    assert rows["MFU, causal-half"] == ["55.0%", "60.5% +5.5 pts", "55.0% +0.0 pts"]
    best = [cell.text for cell in page.one("table", class_="beside").all("td", class_="best")]
    assert "39,600 +10.0%" in best and all("before" not in each for each in best)


def test_only_differences_are_listed(page: Node) -> None:
    stated, *rest = page.one("section", id="differences").all("table")
    assert stated.rows()[1:] == [
        ["train.micro_batch_size", "1", "2", "1"],
        ["version: torch", "2.11.0", "2.12.0", "2.11.0"],
    ]
    assert rest[0].rows()[1:] == [["optim.lr", "-", "0.001", "-"]]


def test_curves_lie_on_each_other(page: Node) -> None:
    chart = page.one("figure", data_chart="tokens_per_s")
    svg = chart.one("svg", role="img")
    assert len(svg.all("path", class_="line")) == 3
    assert len({group.attributes["class"] for group in svg.all("g")}) == 3
    assert [each.text for each in chart.one("ul", class_="legend").all("li")] == ["before", "after", "bare"]
    assert chart.one("table").rows()[0] == ["step", "before", "after", "bare"]


def test_waterfalls_side_by_side(page: Node) -> None:
    section = page.one("section", id="waterfall")
    rows = section.one("table", class_="waterfall").all("tr")
    assert len(rows) == 1 + len(LOST_MS) and all(
        len(row.all("span", class_="track")) == 2 for row in rows[1:]
    )
    assert "bare: no step was profiled." in section.text
    assert len(section.all("div", class_="stack")) == 2


def test_each_run_has_its_own_part(page: Node) -> None:
    parts = page.all("details", class_="run")
    assert [part.all("summary")[0].text for part in parts] == ["before", "after", "bare"]
    ids = [each.attributes["id"] for each in page.all() if "id" in each.attributes]
    assert len(ids) == len(set(ids))
    assert all(link.attributes["href"][1:] in ids for link in page.all("a"))


def test_runs_that_do_not_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, ledger=account_of()) for name in ("one", "two")]
    page = read_page(render(make_page(read_runs(runs))))
    assert "In nothing that all of their folders state." in page.one("section", id="differences").text


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    assert unique_labels([Path("/a/x/run"), Path("/b/x/run")]) == ["a/x/run", "b/x/run"]
    assert unique_labels([Path("/a/one"), Path("/b/two")]) == ["one", "two"]
    folder = make_run(tmp_path / "mine")
    with pytest.raises(UsageError, match="named twice"):
        read_runs([folder, folder / ".." / "mine"])
