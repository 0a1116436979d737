"""MFU with its parts, medians, and the summary document."""

import math
from dataclasses import replace

import pytest

from redline.choice import Choice
from redline.errors import TrainingError
from redline.formulas.flops import flops_per_token
from redline.formulas.shape import ModelShape
from redline.hardware import Hardware, hardware_named
from redline.ledger import RunStatistics, RunSummary, Utilisation, mfu, read_summary, write_summary

SHAPE = ModelShape(
    num_layers=2,
    hidden=64,
    ffn=256,
    num_heads=4,
    num_groups=4,
    head_dim=16,
    vocab_size=1000,
    padded_vocab_size=1024,
    max_positions=128,
)


def test_420_teraflops_on_an_h200():
    """B084: 42.5 % of the dense peak; over the sparse one it would seem 21."""
    h200 = hardware_named("NVIDIA H200")
    found = Utilisation(
        flops_per_s=420e12,
        peak_flops_per_s=h200.peak("bf16"),
        convention="causal-half",
        dtype="bf16",
        peak_source=h200.peak_source,
    )
    assert found.value == pytest.approx(0.4245, abs=5e-5)


def test_numerator_denominator_and_convention_in_one_line():
    half, full = (flops_per_token(SHAPE, 128, convention) for convention in ("causal-half", "full"))
    h100 = hardware_named("h100")
    line = str(mfu(half, 1e6, h100, "bf16"))
    for part in ("causal-half", "recompute not counted", "989 TFLOP/s bf16", h100.peak_source):
        assert part in line
    one, other = mfu(half, 1e6, h100, "bf16"), mfu(full, 1e6, h100, "bf16")
    assert one.flops_per_s == half.total * 1e6 and one.peak_flops_per_s == h100.peak("bf16")
    assert other.value / one.value == pytest.approx(full.total / half.total)
    assert other.as_dict()["convention"] == "full"


def test_no_peak_no_mfu():
    unknown = Hardware(name="something", kind="cuda", memory_bytes=1)
    found = mfu(flops_per_token(SHAPE, 128), 1e6, unknown, "bf16")
    assert found.value is None and str(found).startswith("n/a") and found.as_dict()["mfu"] is None


def test_medians_leave_out_the_first_steps(record):
    statistics = RunStatistics(warmup_steps=2)
    assert statistics.step_time_s is None and statistics.tokens_per_s is None
    for step, time in enumerate((9.0, 8.0, 1.0, 3.0, 2.0, 2.5, 1.5), start=1):
        statistics.add(record(step, step_time_s=time, tokens_per_s=10 / time, memory=step, skipped=step == 3))
    assert statistics.step_time_s == 2.0 and statistics.tokens_per_s == 5.0
    assert statistics.steps == 7 and statistics.peak_memory_bytes == 7 and statistics.skipped_steps == 1
    assert statistics.step_time_spread == pytest.approx((2.75 - 1.25) / 2)


def test_a_run_shorter_than_its_warmup_still_has_a_median(record):
    statistics = RunStatistics()
    statistics.add(record(1, step_time_s=4.0))
    assert statistics.step_time_s == 4.0 and statistics.step_time_spread is None


def summary():
    half = mfu(flops_per_token(SHAPE, 128), 1e6, hardware_named("h100"), "bf16")
    return RunSummary(
        name="demo",
        outcome="finished",
        steps=10,
        consumed_samples=80,
        consumed_tokens=10240,
        wall_time_s=61.0,
        parameters=123456,
        hardware=hardware_named("h100").as_dict(),
        utilisation=(half,),
        tokens_per_s=1e6,
        predicted_memory={"total": 100, "parts": {"weights": 100}},
        measured_memory_bytes=110,
        valid_loss=math.nan,
        choices=(Choice("precision", "auto", "bf16", "because"),),
        files={"metrics": "metrics.jsonl"},
        extra={"label": "x"},
    )


def test_the_document_comes_back(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, summary())
    document = read_summary(path)
    assert document == summary().as_dict()
    assert document["valid_loss"] is None and document["label"] == "x"
    assert document["mfu"]["causal-half"]["mfu"] == pytest.approx(summary().utilisation[0].value)
    assert document["choices"] == [{"what": "precision", "asked": "auto", "ran": "bf16", "why": "because"}]


def test_an_old_summary_survives_a_failed_write(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, summary())
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_summary(path, replace(summary(), extra={"bad": object()}))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(TrainingError, match="cannot write"):
        write_summary(tmp_path / "no" / "folder.json", summary())
