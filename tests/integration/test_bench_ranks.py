"""`redline bench comm` and `bench gemm` at the sizes of a CPU: which rows come, and what they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.bench import comm
from redline.bench.comm import KINDS, bench_comm
from redline.bench.gemm import bench_gemm
from redline.config import Environment
from redline.errors import UsageError
from redline.hardware import hardware_named, read_links
from redline.hardware.links import Line
from redline.plan.cost_rates import rates_of

from .ranks import on_ranks


def test_collectives_over_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comm.QUICK, "cpu", range(12, 15))

    def work(environment: Environment) -> Any:
        said: list[str] = []
        return bench_comm(environment, device_type="cpu", quick=True, say=said.append), said

    (rows, said), other = on_ranks(2, work)
    assert other == ([], [])
    assert [row["case"] for row in rows] == [
        name for kind in KINDS for name in (kind, kind, kind, f"{kind}, fit")
    ]
    for point in (row for row in rows if "fit" not in row["case"]):
        assert point["s"] > 0 and point["bus_bytes_per_s"] == point["sent_bytes"] / point["s"]
        assert point["sent_bytes"] == point["bytes"] * (1 if point["case"] in ("all_reduce", "send") else 0.5)
    for fit in (row for row in rows if "fit" in row["case"]):
        assert (fit["backend"], fit["ranks"]) == ("gloo", 2) and fit["alpha_s"] >= 0 <= fit["beta_s_per_byte"]
    assert len(said) == len(KINDS)


def test_the_lines_are_kept_for_predictions(tmp_path: Path) -> None:
    """As the card's, without those that had no slope; where they cannot be, that is said."""

    def fit(kind: str, rate: float | None) -> dict[str, Any]:
        return {"case": f"{kind}{comm.FIT}", "ranks": 2, "alpha_s": 2e-5, "bytes_per_s": rate}

    rows, said = [{"case": "all_reduce"}, fit("all_reduce", 1e11), fit("send", None)], list[str]()
    comm.keep_links(tmp_path / "links.json", "NVIDIA H200", rows, said.append)
    found = read_links(tmp_path / "links.json")["H200 SXM"]
    assert dict(found.lines) == {"all_reduce": Line(2e-5, 1e11)} and found.ranks == 2
    sheet = hardware_named("h200")
    assert sheet is not None
    measured = rates_of(sheet, measured={"H200 SXM": found}).collectives
    assert measured["all_reduce"].bytes_per_s == 1e11 and rates_of(sheet).collectives.keys() > measured.keys()
    (tmp_path / "file").write_text("")
    comm.keep_links(tmp_path / "file" / "links.json", "NVIDIA H200", rows, said.append)
    assert "kept in" in said[0] and "not kept" in said[1]


def test_one_process_has_nobody_to_talk_to() -> None:
    with pytest.raises(UsageError, match="needs several processes"):
        bench_comm(Environment(), device_type="cpu", quick=True, say=print)


def test_flat_buffers_and_the_plain_loop_train_alike(tmp_path: Path) -> None:
    """The same numbers up to bf16 gradients, which the plain loop rounds once more: so one compares like."""
    rows = bench_gemm(Environment(cache_dir=tmp_path), device_type="cpu", say=lambda _: None)
    *linears, step = rows
    assert [row["case"] for row in linears] == ["tiny qkv", "tiny fc2"]
    assert all(row["apart_over_fused"] == row["apart_s"] / row["fused_s"] for row in linears)
    assert step["case"] == "step" and step["plain_over_flat"] == step["plain_s"] / step["flat_s"]
    assert step["losses"]["flat"][0] == step["losses"]["plain"][0]
    assert step["losses"]["flat"] == pytest.approx(step["losses"]["plain"], rel=1e-3)
    assert len(set(step["losses"]["plain"])) == len(step["losses"]["plain"]), "both learn"
