"""`redline bench attention`: it runs on a CPU, and refuses to time what is wrong."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from redline.attention import Request, unfused_attention
from redline.bench.attention import all_right, gate, shapes
from redline.cli.main import main
from redline.report.attention import print_attention

SMALL = Request(
    device_type="cpu", dtype=torch.float32, head_dim=16, num_heads=4, num_groups=2, seq_length=40, packed=True
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the grid of a GPU takes minutes")
def test_a_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "attention.json"
    assert main(["bench", "attention", "--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["device"] == "cpu" and result["torch"] == torch.__version__
    for row in result["results"]:
        timed = [each for each in row["backends"].values() if "forward_s" in each]
        assert timed and all(each["gate"]["passed"] and each["backward_flops_per_s"] > 0 for each in timed)
        assert row["auto"]["over_best"] >= 1 and row["backends"]["fused"]["error"]
    assert "PyTorch hands it no packed documents" in " ".join(capsys.readouterr().out.split())
    assert main(["bench", "attention", "extra"]) == 2


def test_the_gate_tells_right_from_wrong():
    assert gate(unfused_attention, SMALL).passed
    crooked = lambda *args, softmax_scale, **more: unfused_attention(  # noqa: E731
        *args, softmax_scale=1.01 * softmax_scale, **more
    )
    assert not gate(crooked, SMALL).passed


def test_the_published_grid():
    grid = list(dict.fromkeys(shapes("cuda", quick=False)))
    assert {each.head_dim for each in grid} == {64, 128} and {each.num_groups for each in grid} == {8, 32}
    assert {each.seq_length for each in grid} >= {1024, 65536} and {each.packed for each in grid} == {
        True,
        False,
    }
    assert all(each.batch == 1 for each in grid if each.packed)
    assert len(list(shapes("cuda", quick=True))) < len(grid) / 4


def test_the_table():
    rates = {"forward_s": 1e-3, "forward_flops_per_s": 6e14, "backward_s": 2e-3, "backward_flops_per_s": 5e14}
    row = {
        "case": "head 64",
        "backends": {"flash": rates, "local": {**rates, "forward_s": 5e-4}, "fused": {"error": "none here"}},
        "auto": {"ran": "flash"},
    }
    out = io.StringIO()
    print_attention([row], Console(file=out, width=120))
    for part in ("600", "500", "*", "fused: none here"):
        assert part in out.getvalue()
    wrong = {**row, "backends": {"flash": {"gate": {"passed": False, "where": "output 0"}}}}
    assert all_right([row]) and not all_right([row, wrong])
