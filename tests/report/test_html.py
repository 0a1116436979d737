"""The page of one run: its numbers are those of the files, what is missing is said, no text is markup."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import IDEAL_MS, LOST_MS, OPERATORS, OPTIONS, PEAK, WALL_MS, account_of, make_run
from read_page import Node, read_page

from redline.doctor import CHECKS
from redline.ledger import METRICS_FILE
from redline.report.html import make_page, read_runs, render
from redline.report.html.axes import linear_axis, log_axis
from redline.report.html.curves import BUCKETS, LOSS, THROUGHPUT, charts_of, points_of
from redline.report.html.headline import cost_per_billion
from redline.report.html.values import number, points, shown


def page_of(*folders: Path, price: float | None = None) -> Node:
    return read_page(render(make_page(read_runs(folders), price)))


def figures(page: Node) -> dict[str, Node]:
    return {each.attributes["data-key"]: each for each in page.all("div", class_="figure")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def page(folder: Path) -> Node:
    return page_of(folder, price=2.5)


def test_headline_is_that_of_summary_json(page: Node, folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    found = figures(page)
    wanted = {
        "tokens_per_s": summary["tokens_per_s"],
        "mfu.causal-half": summary["mfu"]["causal-half"]["mfu"],
        "mfu.full": summary["mfu"]["full"]["mfu"],
        "memory_bytes": summary["measured_memory_bytes"],
        "train_loss": summary["train_loss"],
        "valid_loss": summary["valid_loss"],
        "step_time_s": summary["step_time_s"],
        "cost_per_billion": 1e9 / summary["tokens_per_s"] / 3600 * 2.5,
    }
    assert {key: node.numbers for key, node in found.items()} == {key: [v] for key, v in wanted.items()}
    assert "36,000" in found["tokens_per_s"].text and "55.0%" in found["mfu.causal-half"].text
    assert "544 TFLOP/s / 989 TFLOP/s bf16" in found["mfu.causal-half"].text
    assert "predicted 69.34 GiB" in found["memory_bytes"].text and "71.00 GiB" in found["memory_bytes"].text
    assert "unigram model 7.4375" in found["valid_loss"].text


def test_cost_counts_every_device() -> None:
    assert cost_per_billion(1e9 / 3600, devices=4, price=2.0) == pytest.approx(8.0)


def test_waterfall_is_that_of_ledger_json_and_adds_up(page: Node) -> None:
    table = page.one("table", class_="waterfall")
    bars = {
        row.attributes["data-key"]: row.numbers for row in table.all("tr") if "data-key" in row.attributes
    }
    assert {key: ms for key, (_, ms) in bars.items()} == LOST_MS
    assert all(points == pytest.approx(-100 * ms / WALL_MS) for points, ms in bars.values())
    mfu, ideal_ms = table.all("tr")[-1].numbers
    assert ideal_ms == IDEAL_MS and mfu == pytest.approx(IDEAL_MS / WALL_MS)
    assert 100 + sum(points for points, _ in bars.values()) == pytest.approx(100 * mfu)


def test_bars_hang_on_each_other(page: Node) -> None:
    """The first ends at the peak, each at the start of the one before, and the MFU's meets the last."""
    styles = [bar.attributes["style"] for bar in page.one("table", class_="waterfall").all("i")]
    places = [tuple(map(float, re.findall(r"[\d.]+", style))) for style in styles]
    whole, *losses, useful = places
    assert whole == (0, 100)
    assert losses[0][0] + losses[0][1] == pytest.approx(100)
    for (left, _), (after, width) in pairwise(losses):
        assert after + width == pytest.approx(left, abs=2e-3)
    assert useful[1] == pytest.approx(losses[-1][0], abs=2e-3)


def test_the_accounts_are_the_whole_step(page: Node) -> None:
    (step,) = page.all("div", class_="stack")
    assert sum(float(each.attributes["style"][6:-1]) for each in step.all("span")) == pytest.approx(100)
    assert "useful 55.0%" in step.attributes["aria-label"] and "unknown 0.5%" in step.attributes["aria-label"]


def test_every_check_is_explained_where_its_link_leads(page: Node) -> None:
    ids = {link.text for link in page.one("table", class_="waterfall").all("a")}
    assert ids and ids <= {each.id for each in CHECKS}
    for link in page.all("a"):
        target = link.attributes["href"]
        assert target.startswith("#"), "the page leads nowhere else"
        assert len(page.all(id=target[1:])) == 1, target


def test_operators_keep_their_numbers(page: Node) -> None:
    rows = page.one("table", class_="operators").all("tr")[1:]
    assert sorted(row.numbers[0] for row in rows) == sorted(ms for *_, ms, _, _ in OPERATORS)
    placed = page.all("span", class_="op")
    assert len(placed) == sum(flops is not None for *_, flops, _ in OPERATORS)
    assert all(
        0 <= float(x) <= 100 for dot in placed for x in re.findall(r"([\d.]+)%", dot.attributes["style"])
    )


def test_a_memset_is_not_credited_with_its_product(tmp_path: Path) -> None:
    """It is launched by the product's operator, and would stand a thousand times above the peak."""
    account = account_of()
    product = account.operators[0]
    memset = replace(product, kind="copy", role="", ms=0.07, flops_per_s=1.7e18, of_peak=1700.0)
    page = page_of(
        make_run(tmp_path / "mine", ledger=replace(account, operators=(*account.operators, memset)))
    )
    assert len(page.all("span", class_="op")) == sum(flops is not None for *_, flops, _ in OPERATORS)
    assert "PFLOP" not in page.one("table", class_="operators").text
    assert "170000%" not in page.one("section", id="operators").text


def test_slowed_steps_are_not_taken_for_ordinary_ones(page: Node, tmp_path: Path) -> None:
    """With what an ordinary step reaches; also where the account was written before there was a median."""
    assert "Slowed steps" not in page.text
    slowed = account_of(step_ms=500.0)
    for name, overhead, summary in (("ended", 0.6, {}), ("killed", None, False)):
        step_ms = None if summary is False else 500.0
        account = replace(
            slowed, overhead=overhead, reference=replace(slowed.reference, step_ms=step_ms, model_flops=None)
        )
        folder = make_run(tmp_path / name, ledger=account, summary=summary, rate=32_768 / 0.5)
        said = page_of(folder).one("section", id="waterfall").text
        assert "+60.0% under the profiler" in said
        assert "an ordinary one takes 500 ms, an MFU of 88.0%" in said


def test_a_run_that_has_not_ended_states_both_conventions(tmp_path: Path) -> None:
    half = IDEAL_MS / 1e3 * PEAK
    account = account_of(attention_flops=half / 10)
    page = page_of(make_run(tmp_path / "mine", summary=False, ledger=account))
    found = figures(page)
    assert found["mfu.causal-half"].numbers == [0.55]
    assert found["mfu.full"].numbers == [pytest.approx(0.605)]
    assert "not ended; 60 steps recorded on NVIDIA H200" in page.one("header").text
    options = OPTIONS.replace("[model]\n", "[model]\nwindow_size = [128, 0]\n")
    windowed = make_run(tmp_path / "windowed", summary=False, ledger=account, options=options)
    assert "mfu.full" not in figures(page_of(windowed))


def test_small_points_keep_a_digit() -> None:
    assert [points(each) for each in (-0.225, 0.015, -0.0002, 0.00001, 0.0)] == [
        "-22.5", "+1.5", "-0.02", "0", "0",
    ]  # fmt: skip


def test_modules_are_added_up_over_the_layers(page: Node) -> None:
    rows = page.one("table", class_="modules").rows()
    assert rows[0] == ["Module", "forward", "backward", "optimizer", "FLOPs"]
    assert rows[1:] == [
        ["mlp", "121.000", "130.000", "", "240T"],
        ["head", "44.000", "", "", "40T"],
        ["(in no module)", "", "", "26.000", ""],
    ]


def test_every_chart_has_its_text(page: Node) -> None:
    charts = page.all("figure", class_="chart")
    assert {chart.attributes.get("data-chart") for chart in charts} == {
        None, "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_now",
    }  # fmt: skip
    for chart in charts:
        assert len(chart.one("svg", role="img").attributes["aria-label"]) > 40
        assert not chart.attributes.get("data-chart") or len(chart.one("table").rows()) > 10
    assert all(table.all("caption") for table in page.all("table"))


def test_a_curves_numbers_are_those_of_metrics_jsonl(page: Node, folder: Path) -> None:
    records = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    data = json.loads(page.one("figure", data_chart="loss").one("script").text)
    training, validation = (dict(map(tuple, each["points"])) for each in data["series"])
    for record in records:
        points = training if record["kind"] == "step" else validation
        assert points[record["step"]] == pytest.approx(record["loss"], rel=1e-5)
    rows = page.one("figure", data_chart="loss").one("table").rows()
    assert rows[0] == ["step", "training", "validation"]
    last = {record["kind"]: shown(record["loss"]) for record in records}
    assert rows[-1] == ["60", last["step"], last["valid"]]


def test_throughput_shows_evaluations_checkpoints_and_profiled_steps(page: Node) -> None:
    svg = page.one("figure", data_chart="tokens_per_s").one("svg", role="img")
    marks = {
        path.attributes["class"]: path.attributes["d"].count("M") for path in svg.all("path", class_="mark")
    }
    assert marks == {"mark evaluation": 3, "mark checkpoint": 2, "mark profiled": 2}
    loss = page.one("figure", data_chart="loss").one("svg", role="img")
    assert loss.one("path", class_="skipped").attributes["d"].count("M") == 1


def test_memory_choices_environment(page: Node) -> None:
    memory = page.one("section", id="memory")
    assert [round(each / 2**30, 2) for each in memory.numbers] == [69.34, 71.0]
    assert "optimizer predicted 21.88 GiB" in memory.text and "predicted / measured 0.98" in memory.text
    parts = memory.one("table", class_="parts").rows()
    assert ["main params", "10.94 GiB", "11.00 GiB"] in parts
    assert ["activations and workspace, together", "20.12 GiB", "21.00 GiB"] in parts
    assert ["kept in reserve", "", "2.00 GiB"] in parts
    saved = memory.one("table", class_="saved").rows()
    assert saved[1:] == [
        ["attention.core", "4.00 GiB", "4.00 GiB"],
        ["mlp.fc2", "2.00 GiB", "3.00 GiB"],
        ["in all", "6.00 GiB", "7.00 GiB"],
    ]
    predicted, measured = memory.all("div", class_="bar")
    assert [len(bar.all("i")) for bar in (predicted, measured)] == [5, 4]
    rows = page.one("section", id="choices").one("table").rows()
    assert ["attention-backend", "auto", "fused", "the fastest of those measured"] in rows
    facts = [row for table in page.one("section", id="environment").all("table") for row in table.rows()]
    assert ["device: name", "NVIDIA H200"] in facts and ["version: torch", "2.11.0"] in facts
    assert ["model.hidden_size", "4096"] in facts


def test_nothing_is_loaded(folder: Path) -> None:
    text = render(make_page(read_runs([folder])))
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(|<(img|iframe|script src|link rel=.stylesheet)", text)


EVIL = "\"><script>alert(1)</script><b onmouseover='x'>{{ 7*7 }}</script>"


def test_no_text_of_a_file_is_markup(tmp_path: Path) -> None:
    """Wherever a file may put text: names of options and choices, paths, keys, operators, versions."""
    account = account_of()
    account = replace(
        account,
        operators=tuple(replace(each, name=EVIL, phase=EVIL, role=EVIL) for each in account.operators),
        losses=tuple(replace(each, cause=EVIL, mends=(EVIL,)) for each in account.losses),
        reference=replace(account.reference, dtype=EVIL, peak_source=EVIL),
    )
    summary = {
        "name": EVIL,
        "outcome": EVIL,
        "choices": [{"what": EVIL, "asked": EVIL, "ran": EVIL, "why": EVIL}],
        "versions": {EVIL: EVIL},
        "files": {EVIL: EVIL},
        "memory_measure": EVIL,
        "hardware": {"name": EVIL, EVIL: EVIL},
        "predicted_memory": {"total": 1, "peak_at": EVIL, "parts": {EVIL: 5}},
        "mfu": {EVIL: {"mfu": 0.5, "dtype": EVIL}},
    }
    folder = make_run(
        tmp_path / '<script>alert("name")',
        steps=8,
        ledger=account,
        summary=summary,
        options=f"[model]\n{json.dumps(EVIL)} = 1\n",
        records=lambda step: {EVIL: step},
    )
    page = page_of(folder)
    assert page.one("title").text.startswith('<script>alert("name")')
    charts = [each for each in page.all("figure") if "data-chart" in each.attributes]
    assert len(page.all("script")) == 1 + len(charts)
    assert not [each for each in page.all("b") if each.attributes]
    assert "{{ 7*7 }}" in page.text
    for script in page.all("script", type="application/json"):
        json.loads(script.text)


@pytest.mark.parametrize("part", ["summary", "ledger", "options"])
def test_what_is_missing_is_said_in_a_line(tmp_path: Path, part: str) -> None:
    folder = make_run(tmp_path / "mine", **{part: False})
    page = page_of(folder)
    said = [each.text for each in page.all("p", class_="absent")]
    assert any(
        {"summary": "summary.json", "ledger": "ledger.json", "options": "config.toml"}[part] in x
        for x in said
    )
    assert figures(page)["tokens_per_s"].numbers[0] == pytest.approx(36_000, rel=0.01)
    no_empty_box(page)


def test_metrics_alone_make_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", summary=False, ledger=False, options=False)
    page = page_of(folder, price=2.5)
    found = figures(page)
    assert found["cost_per_billion"].numbers == [] and "n/a" in found["cost_per_billion"].text
    assert found["mfu.causal-half"].numbers == [0.55]
    records = map(json.loads, (folder / METRICS_FILE).read_text().splitlines())
    losses = {record["kind"]: record["loss"] for record in records}
    assert found["train_loss"].numbers == [losses["step"]]
    assert found["valid_loss"].numbers == [losses["valid"]]
    for section in ("waterfall", "operators", "choices", "doctor"):
        assert page.one("section", id=section).all("p", class_="absent"), section
    no_empty_box(page)


def no_empty_box(page: Node) -> None:
    for section in page.all("section"):
        assert len([each for each in section.inside if isinstance(each, Node)]) > 0
    for table in page.all("table"):
        assert len(table.all("tr")) > 0
    for figure in page.all("figure"):
        assert figure.all("path", class_="line") or figure.all("span", class_="op")


def test_a_device_without_limits(tmp_path: Path) -> None:
    """A CPU without a data sheet: shares of the time, no MFU, a roofline without a roof."""
    account = account_of(peak_flops_per_s=None, bandwidth_bytes_per_s=None)
    page = page_of(make_run(tmp_path / "mine", ledger=account, summary={"mfu": {}}))
    waterfall = page.one("section", id="waterfall")
    assert "No peak is known" in waterfall.text and "matrix products" in waterfall.text
    assert (
        "below peak" not in waterfall.text and "MFU " not in waterfall.one("table", class_="waterfall").text
    )
    operators = page.one("section", id="operators")
    assert "bf16 peak and memory bandwidth is not known" in operators.text
    assert not operators.all("path", class_="roof") and operators.all("span", class_="op")


def test_further_values_get_a_chart_and_constants_none(tmp_path: Path) -> None:
    """fp8 statistics, say."""
    more = {"fp8_amax_max": lambda step: step / 7, "fp8_margin": lambda step: 0.0}
    folder = make_run(tmp_path / "mine", records=lambda step: {key: read(step) for key, read in more.items()})
    ids = [chart.id for chart in charts_of(read_runs([folder]))]
    assert "fp8_amax_max" in ids and "fp8_margin" not in ids and "loss_scale" not in ids


def test_what_is_recorded_now_and_then_is_a_line(tmp_path: Path) -> None:
    """And a value alone between two that are not finite is a dot."""
    now_and_then = lambda step: {"fp8_overshoot": 1 + 1 / step} if step % 10 == 0 else {}  # noqa: E731
    lonely = lambda step: {"norm": float(step) if step % 2 else None}  # noqa: E731
    folder = make_run(tmp_path / "mine", records=lambda step: now_and_then(step) | lonely(step))
    charts = {chart.id: chart.curves[0] for chart in charts_of(read_runs([folder]))}
    overshoot = charts["fp8_overshoot"]
    assert (overshoot.line.count("M"), overshoot.line.count("L"), overshoot.dots) == (1, 5, "")
    assert charts["norm"].dots.count("M") == 30


def test_several_ranks(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "mine", ranks=4), price=1.0)
    assert "mean of 4 ranks" in page.one("section", id="waterfall").text
    assert ["exposed data-parallel collectives", "24.000", "36.000", "1", "+50%"] in [
        row for table in page.all("table") for row in table.rows()
    ]
    assert figures(page)["cost_per_billion"].numbers == [pytest.approx(1e9 / 36_000 / 3600)]


def test_a_gap_where_the_loss_is_not_finite(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", records=lambda step: {"loss": None} if 30 <= step < 33 else {})
    (run,) = read_runs([folder])
    points = points_of(run.steps, LOSS)
    assert [place for place, point in enumerate(points) if point is None] == [29, 30, 31]
    chart = charts_of([run])[0]
    assert chart.curves[0].line.count("M") == 2


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(1, 5 * BUCKETS + 3), st.randoms(use_true_random=False))
def test_thinning_hides_no_extreme(steps: int, random: Any) -> None:
    values = [random.uniform(-5, 5) for _ in range(steps)]
    records = [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
    points = [point for point in points_of(records, LOSS) if point is not None]
    assert len(points) <= BUCKETS
    assert min(point.low for point in points) == min(values)
    assert max(point.high for point in points) == max(values)
    assert all(point.low - 1e-9 <= point.value <= point.high + 1e-9 for point in points)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-12, 1e18), min_size=1, max_size=5), st.booleans())
def test_axes_hold_their_values_and_are_labelled(values: list[float], log: bool) -> None:
    axis = log_axis(values, whole=True) if log else linear_axis(values, from_zero=True)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert 1 <= len(axis.ticks) <= 12
    assert all(-0.01 <= tick.percent <= 100.01 for tick in axis.ticks)
    assert len({tick.text for tick in axis.ticks}) == len(axis.ticks)


def test_a_run_of_a_million_steps_stays_small(tmp_path: Path) -> None:
    """By its parts: the size of a page does not grow with the run (30,000 steps stand for more)."""
    page = render(make_page(read_runs([make_run(tmp_path / "long", steps=30_000)])))
    assert len(page) < 600_000


@pytest.mark.parametrize("value", [None, "7", True, math.nan, math.inf, [1]])
def test_what_is_no_number_is_none(value: Any) -> None:
    assert number(value) is None


def test_throughput_without_the_profiled_steps(tmp_path: Path) -> None:
    """Where summary.json does not state the median, profiled steps have no part in it either."""
    slow = lambda step: {"tokens_per_s": 1.0, "profiled": True} if step % 2 else {}  # noqa: E731
    (run,) = read_runs([make_run(tmp_path / "mine", summary=False, records=slow)])
    assert run.record.tokens_per_s == pytest.approx(36_000, rel=0.01)
    assert len([p for p in points_of(run.steps, THROUGHPUT) if p is not None]) == 60


FP8_ROWS = [
    dict(zip(("step", "site", "operand", "amax", "scale", "saturated", "underflowed"), row, strict=True))
    for row in (
        (10, "layers.0.mlp.fc1", "x", 3.5, 128.0, 0.0, 0.25),
        (10, "layers.1.mlp.fc1", "x", 9.0, 32.0, 0.5, 0.0),
        (20, "layers.0.mlp.fc1", "x", 4.0, 64.0, 0.0, 0.0),
        (20, "layers.1.mlp.fc1", "x", None, None, 0.125, 0.0),
        (20, "layers.1.mlp.fc1", "dy", 1e-6, 5e9, 0.0, 1e-7),
    )
]


def casts(page: Node) -> list[list[list[str]]]:
    """The rows of every table about casts, without its header."""
    return [table.rows()[1:] for table in page.all("table", class_="casts")]


def test_what_casts_to_fp8_lost(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert not casts(page_of(folder))
    lines = [json.dumps(row) for row in FP8_ROWS]
    odd = ['{"step": 30}', '{"step": 30, "saturated": "all", "underflowed": 0}', '{"cut']
    (folder / "fp8.jsonl").write_text("\n".join([*lines, *odd]))
    worst, newest = casts(page_of(folder))
    assert worst == [
        ["mlp.fc1", "input", "50% layer 1, step 10", "25% layer 0, step 10", "9", "32 to 128"],
        ["mlp.fc1", "gradient", "0", "1.0e-07 layer 1, step 20", "1.00e-06", "5B"],
    ]
    assert newest == [
        ["0", "mlp.fc1", "input", "0", "0", "4", "64"],
        ["1", "mlp.fc1", "input", "12.5%", "0", "n/a", "one a block"],
        ["1", "mlp.fc1", "gradient", "0", "1.0e-07", "1.00e-06", "5B"],
    ]
