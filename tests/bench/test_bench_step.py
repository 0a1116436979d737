"""One configuration trained several ways: which rows come, what they compare, and that one may fail alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.bench.variants import IMPLEMENTATIONS, OPERATORS
from redline.build import compile
from redline.cli.main import main
from redline.config.flags import to_flag
from redline.plan.kernels import SWITCHES

TINY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --vocab-size 101 --seq-length 64 --swiglu "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 10 --eval-iters 0 --device cpu --threads 1 "
    "--hidden-dropout 0 --attention-dropout 0 --steps 2"
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench("--flags") -> (exit code, rows)."""
    torch._dynamo.reset()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set for the kernels' tests beside these
    monkeypatch.setattr("redline.data.samples.MOCK_DOCUMENTS", 500)
    monkeypatch.setattr("redline.bench.variants.NUM_DOCUMENTS", 100)
    monkeypatch.setattr("redline.bench.variants.MEAN_LENGTH", 15)
    monkeypatch.setattr("redline.run.opening.with_measured_peak", lambda hardware, dtype: hardware)

    def call(flags: str, words: str = TINY) -> tuple[int, list[dict[str, Any]]]:
        out = tmp_path / "rows.json"
        code = main(f"bench step {words} {flags} --out {out}".split())
        return code, json.loads(out.read_text())["results"]

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs every row")
def test_a_row_that_cannot_run_says_so_beside_the_others(bench: Any) -> None:
    code, rows = bench("--compare --mock-data")
    assert code == 1
    assert [row["variant"] for row in rows] == list(IMPLEMENTATIONS)
    errors = {row["variant"]: row.get("error", "") for row in rows}
    assert errors["eager local"] == errors["compiled local"] == ""
    assert all("cannot" in errors[name] for name in IMPLEMENTATIONS if "fused" in name), errors
    assert not any("mend:" in error for error in errors.values()), "the flags of a row are not the user's"
    first, compiled = rows[0], rows[2]
    assert first["ratio"] == first["flops_ratio"] == 1.0
    assert compiled["ratio"] == pytest.approx(first["step_time_s"] / compiled["step_time_s"], rel=0.5)
    assert compiled["loss"] == first["loss"], "the same training"


def test_packed_documents_beside_dense_samples(bench: Any) -> None:
    code, (dense, packed) = bench("--packed")
    assert code == 0
    assert dense["tokens_per_step"] == 2 * 64 >= packed["tokens_per_step"] > 0.9 * 2 * 64
    assert packed["parameters"] == dense["parameters"]
    assert packed["flops_ratio"] < packed["ratio"], "less attention to compute for a token"


def test_operators_differ_in_nothing_else(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator is plain in one row; the residual joins the norm only where that is RMSNorm."""
    assert all("--transformer-impl fused" in " ".join(flags) for flags in OPERATORS.values())
    off = {flag for flags in OPERATORS.values() for flag in flags if flag.startswith("--no-")}
    assert off == {to_flag(f"no_{name}") for name in SWITCHES}
    written: list[int] = []
    monkeypatch.setattr(
        "redline.bench.write_result", lambda out, case, device, rows, commit: written.append(len(rows))
    )
    rate = {"tokens_per_s": 1.0, "step_time_s": 1.0, "case": "tiny", "choices": []}
    mfu = {"causal-half": {"flops_per_s": 1.0, "mfu": None}}
    memory = {"peak_memory_bytes": 1, "predicted_memory": {"total": 1}}
    monkeypatch.setattr(
        "redline.bench.variants.bench_step",
        lambda *_, **__: {**rate, **memory, "mfu": mfu, "attention": None},
    )
    words = f"bench step {TINY} --operators --mock-data --out x.json"
    assert main(words.split()) == 0
    assert written == [1, 2, 3, 4, 4], "after each row, so that a run cut short leaves what it measured"
    written.clear()
    assert main(f"{words} --normalization RMSNorm".split()) == 0
    assert written == [1, 2, 3, 4, 5, 5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs fused operators")
@pytest.mark.parametrize("more", ["", "--fp64"])
def test_operators_that_cannot_run_are_refused_once(
    bench: Any, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words of what was typed, with what to do; an older result stays."""
    out = tmp_path / "rows.json"
    out.write_text("older")
    assert main(f"bench step {TINY} {more} --operators --mock-data --out {out}".split()) == 2
    said = capsys.readouterr()
    assert said.err.count("--operators compares fused operators, and none can run here") == 1
    assert ("fp64" if more else "need an NVIDIA GPU") in said.err and "mend: run it where" in said.err
    assert "--transformer-impl" not in said.err and "written" not in said.out
    assert out.read_text() == "older"


def test_rows_without_a_figure_leave_an_older_result(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("redline.bench.variants.bench_step", fail)
    out = tmp_path / "rows.json"
    out.write_text("older")
    assert main(f"bench step {TINY} --compare --mock-data --out {out}".split()) == 1
    said = capsys.readouterr().out
    assert out.read_text() == "older" and said.count(": out of memory") == len(IMPLEMENTATIONS)
    assert f"nothing was measured, and nothing written to {out}" in said


def test_data_beside_packed_are_refused_by_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("--data-path /x", "--mock-data"):
        assert main(f"bench step {TINY} --packed {given} --out x.json".split()) == 2
        said = capsys.readouterr().err
        assert f"--packed and {given.split()[0]} exclude each other" in said and "brings its own data" in said


def test_what_every_row_lacks_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = TINY.replace("--vocab-size 101 ", "")
    out = tmp_path / "rows.json"
    assert main(f"bench step {words} --packed --compare --out {out}".split()) == 2
    said = "".join(capsys.readouterr())
    assert said.count("the size of the vocabulary is not known") == 1 and "written" not in said
    assert not out.exists()


def test_a_run_without_a_length_is_as_long_as_the_measurement(bench: Any) -> None:
    code, (row,) = bench("--mock-data", TINY.replace("--train-iters 10 ", ""))
    assert code == 0 and row["steps"] == 2
