"""What a run prints: the log line, the live display, the summary, on wide and narrow terminals."""

import datetime
import io
import math

import pytest
from rich.console import Console

from redline.ledger import StepRecord, ValidRecord
from redline.report import TrainProgress, print_summary, step_line, valid_line
from redline.report.progress import fit_facts

NOW = datetime.datetime(2026, 11, 29, 12, 30, 1, 5)


def record(step, **values):
    facts = {
        "loss": 3.0,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens_per_s": 1000.0,
        "step_time_s": 0.5,
        "memory": 3 << 30,
        "consumed_samples": 8 * step,
        "global_batch_size": 8,
        "mfu": 0.4,
        "flops_per_s": 4e14,
        "memory_now": 2 << 30,
    }
    return StepRecord(step=step, **(facts | values))


def test_log_line_in_megatrons_order_and_words():
    steps = [record(1, loss=2.0), record(2, loss=4.0, step_time_s=0.7)]
    line = step_line(steps, 100, NOW, throughput=True)
    assert line.startswith(
        " [2026-11-29 12:30:01.000005] iteration        2/     100 | consumed samples:           16 |"
    )
    parts = (
        "elapsed time per iteration (ms): 600.0",
        "throughput per GPU (TFLOP/s/GPU): 400",
        "tokens/s: 1000",
        "MFU: 40.0%",
        "learning rate: 1.000000E-03",
        "global batch size:     8",
        "lm loss: 3.000000E+00",
        "loss scale: 1.0",
        "grad norm: 1.500",
        "memory (GiB): 2.00/3.00",
        "number of skipped iterations:   0",
        "number of nan iterations:   0 |",
    )
    places = [line.index(part) for part in parts]
    assert places == sorted(places)
    assert "throughput" not in step_line(steps, 100, NOW)


def test_skipped_and_broken_steps_do_not_enter_the_loss():
    steps = [record(1, loss=2.0), record(2, loss=math.nan, skipped=True, nonfinite="the loss is nan")]
    line = step_line(steps, 100, NOW)
    assert "lm loss: 2.000000E+00" in line
    assert "skipped iterations:   1" in line and "nan iterations:   1" in line
    assert "lm loss" not in step_line(steps[1:], 100, NOW)


def test_rates_are_those_of_the_whole_time():
    """A slow step counts by how long it took: 1500 tokens in 1.5 s, not the mean of 2000 and 500 a second."""
    steps = [
        record(1, tokens_per_s=2000.0, step_time_s=0.5, mfu=0.6, flops_per_s=6e14),
        record(2, tokens_per_s=500.0, step_time_s=1.0, mfu=0.15, flops_per_s=1.5e14),
    ]
    line = step_line(steps, 100, NOW, throughput=True)
    assert "tokens/s: 1000 |" in line and "MFU: 30.0%" in line and "(TFLOP/s/GPU): 300 |" in line


def test_what_is_not_known_is_left_out():
    bare = record(1, mfu=None, flops_per_s=None, memory_now=None, extra={"num_zeros": 7, "params_norm": None})
    line = step_line([bare], 100, NOW, throughput=True)
    assert "MFU" not in line and "throughput" not in line and "memory (GiB): 3.00" in line
    assert "num zeros: 7" in line and "params norm" not in line


def test_validation_line():
    line = valid_line(ValidRecord(step=20, loss=2.0, tokens=10, time_s=1.0))
    assert (
        line == " validation loss at iteration 20 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |"
    )


DOCUMENT = {
    "name": "demo",
    "outcome": "finished 300 steps",
    "steps": 300,
    "consumed_tokens": 1_228_800,
    "wall_time_s": 130.0,
    "parameters": 4_000_000,
    "hardware": {"name": "Some CPU", "num_devices": 1},
    "train_loss": 3.1,
    "valid_loss": 3.2,
    "unigram_loss": 6.4,
    "tokens_per_s": 9800.0,
    "step_time_s": 0.42,
    "skipped_steps": 2,
    "mfu": {
        "causal-half": {
            "mfu": 0.55,
            "flops_per_s": 1.1e11,
            "peak_flops_per_s": 2e11,
            "dtype": "fp32",
            "peak_source": "measured",
        },
        "full": {
            "mfu": None,
            "flops_per_s": 1.2e11,
            "peak_flops_per_s": None,
            "dtype": "fp32",
            "peak_source": "",
        },
    },
    "predicted_memory": {
        "total": 3 << 30,
        "parts": {"weights": 1 << 30, "main_grads": 2 << 30, "main_params": 0},
    },
    "measured_memory_bytes": 4 << 30,
    "memory_measure": "peak resident",
    "choices": [
        {"what": "attention-backend", "asked": "auto", "ran": "flash", "why": "the fastest here"},
        {"what": "precision", "asked": "bf16", "ran": "fp32", "why": "no bf16 units"},
    ],
    "files": {"metrics": "runs/demo/metrics.jsonl"},
}


def printed(document, width, **options):
    out = io.StringIO()
    print_summary(document, Console(file=out, width=width, **options))
    return out.getvalue()


def test_summary_says_everything():
    text = printed(DOCUMENT, 120)
    for part in (
        "demo: finished 300 steps", "Some CPU", "4,000,000", "300, 2 skipped", "3.2000 nats", "6.4000 nats",
        "9,800 tokens/s", "55.0% = 110 GFLOP/s / 200 GFLOP/s fp32 (measured)", "n/a (120 GFLOP/s",
        "predicted", "3.00 GiB", "measured (peak resident)", "4.00 GiB", "attention-backend",
        "the fastest here", "runs/demo/metrics.jsonl",
    ):  # fmt: skip
        assert part in text, part
    assert "main params" not in text  # nothing is stored there
    assert "predicted / measured" not in text  # a CPU's measure counts more than the prediction
    on_gpu = {**DOCUMENT, "hardware": {**DOCUMENT["hardware"], "kind": "cuda"}}
    assert "0.75" in printed(on_gpu, 120)


def test_more_than_the_peak_is_explained():
    facts = {**DOCUMENT["mfu"]["causal-half"], "mfu": 1.05, "flops_per_s": 2.1e11}
    words = "105.0% = 210 GFLOP/s / 200 GFLOP/s fp32 (measured); above 100%: that peak is too low"
    assert words in printed(DOCUMENT | {"mfu": {"causal-half": facts}}, 200)
    assert "above 100%" not in printed(DOCUMENT, 200)


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_summary_fits_narrow_terminals(width):
    text = printed(DOCUMENT, width)
    assert max(map(len, text.splitlines())) <= width
    assert "3.2000" in text and "3.00 GiB" in text


def test_an_early_end_prints_too():
    least = {
        key: DOCUMENT[key]
        for key in ("name", "outcome", "steps", "consumed_tokens", "wall_time_s", "parameters", "hardware")
    }
    assert "demo: finished" in printed(least, 80)


def test_no_color(monkeypatch):
    colourful = printed(DOCUMENT, 100, force_terminal=True, color_system="truecolor")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed(DOCUMENT, 100, force_terminal=True, color_system="truecolor")
    assert "\x1b[33m" in colourful and "\x1b[33m" not in plain


def test_markup_in_names_is_text():
    text = printed(DOCUMENT | {"files": {"metrics": "runs/[bold]x[/bold]"}}, 100)
    assert "[bold]x[/bold]" in text


def test_facts_fit_the_width():
    step = record(1)
    assert fit_facts(step, 200) == "loss 3.0000  1k tok/s  MFU 40.0%  3.00 GiB"
    with_rate = "loss 3.0000  1k tok/s  400 TFLOP/s  MFU 40.0%  3.00 GiB"
    assert fit_facts(step, 200, throughput=True) == with_rate
    assert fit_facts(step, 25) == "loss 3.0000  1k tok/s"
    assert fit_facts(step, 1) == "loss 3.0000"
    assert "MFU" not in fit_facts(record(1, mfu=None), 200)


@pytest.mark.parametrize("width", [40, 100])
def test_progress_on_a_terminal(width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with TrainProgress(10, start_step=3, console=console) as progress:
        progress.update(record(4))
        progress.message("a line with [brackets]")
    text = out.getvalue()
    assert "4/10" in text and "loss 3.0000" in text and "a line with [brackets]" in text
    assert ("MFU" in text) == (width == 100)


def test_what_a_step_adds_stands_beside_the_sum_of_its_parts():
    parts = {"weights": 1 << 30, "activations_mlp": 1 << 30, "workspace_loss": 3 << 30}
    document = {
        **DOCUMENT,
        "predicted_memory": {"total": 5 << 30, "parts": parts},
        "measured_memory": {"weights": 1 << 30, "activations_and_workspace": 7 << 30},
    }
    line = next(line for line in printed(document, 120).splitlines() if "activations and workspace" in line)
    assert line.split()[-4:] == ["4.00", "GiB", "7.00", "GiB"]


def test_what_is_held_after_the_forward_pass_is_compared_too():
    predicted = {"total": 5 << 30, "parts": {}, "moments": {"forward": 3 << 30}}
    document = {**DOCUMENT, "predicted_memory": predicted, "measured_after_forward": 2 << 30}
    line = next(line for line in printed(document, 120).splitlines() if "after the forward pass" in line)
    assert line.split()[-4:] == ["3.00", "GiB", "2.00", "GiB"]


def test_what_is_saved_stands_by_module_or_why_it_does_not():
    predicted = {"total": 5 << 30, "parts": {}, "saved": {"attention.core": 3 << 30, "mlp.fc2": 1 << 30}}
    found = {"by_module": {"attention.core": 2 << 30, "mlp.fc2": 1 << 30}, "unknown": None}
    document = {**DOCUMENT, "predicted_memory": predicted, "measured_activations": found}
    lines = [line.split() for line in printed(document, 120).splitlines() if "saved " in line]
    core, whole = (next(line for line in lines if name in line) for name in ("attention.core", "backward"))
    assert core[-4:] == ["3.00", "GiB", "2.00", "GiB"] and whole[-4:] == ["4.00", "GiB", "3.00", "GiB"]
    document["measured_activations"] = {"by_module": None, "unknown": "a graph is compiled"}
    assert "not known by module (a graph is compiled)" in " ".join(printed(document, 200).split())
