"""Measured links: the listed ones are the result file's, a machine's own come first, a bad file is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redline.hardware import MeasuredLinks, card_of, links_of, read_links, write_links
from redline.hardware.links import H200_PAIR, LINKS, Line

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "two-gpus-h200.json"
SEEN = MeasuredLinks(card="H200 SXM", ranks=4, lines={"all_reduce": Line(1e-5, 4e11)}, source="a test")


def test_the_listed_lines_are_the_measured_ones() -> None:
    fits = {row["kind"]: row for row in json.loads(RESULT.read_text())["collectives"] if "alpha_s" in row}
    assert fits.keys() == H200_PAIR.lines.keys()
    for kind, line in H200_PAIR.lines.items():
        assert line.alpha_s == pytest.approx(fits[kind]["alpha_s"], rel=2e-3)
        assert line.bytes_per_s == pytest.approx(fits[kind]["bytes_per_s"], rel=2e-3)
        assert fits[kind]["gpus"] == H200_PAIR.ranks
    assert all(each.source and each.card == card_of(each.card) for each in LINKS)


def test_what_was_measured_here_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "links.json"
    assert links_of("NVIDIA H200", read_links(path)) is H200_PAIR
    write_links(path, SEEN)
    other = MeasuredLinks(card="Nobody's card", ranks=2, lines={"send": Line(2e-5, 1e10)}, source="a test")
    write_links(path, other)
    assert links_of("NVIDIA H200", read_links(path)) == SEEN
    assert links_of("Nobody's card", read_links(path)) == other
    assert links_of("NVIDIA H100 80GB HBM3", read_links(path)) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"format": 2, "links": {}}', '{"format": 1}',
        '{"format": 1, "links": {"H200 SXM": {"ranks": 2, "lines": {"send": [0.1]}, "source": ""}}}',
        '{"format": 1, "links": {"H200 SXM": {"ranks": 2, "lines": {"send": [-1, 2]}, "source": ""}}}',
        '{"format": 1, "links": {"H200 SXM": {"ranks": 2, "lines": {"send": [1, NaN]}, "source": ""}}}',
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    assert read_links(path) == {}
    write_links(path, SEEN)
    assert read_links(path) == {"H200 SXM": SEEN}
