"""Obeyed or refused: a backend asked for by name runs or fails with the reason; `auto` records its choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.attention import (
    BACKENDS,
    Calibration,
    Request,
    flash_attention,
    fused_attention,
    select_backend,
    supports,
    unfused_attention,
)
from redline.attention.probe import probe
from redline.attention.select import _fastest
from redline.attention.timing import Timing, measure
from redline.errors import ConfigError

PLAIN = Request(device_type="cpu", dtype=torch.float32, head_dim=16, num_heads=4, num_groups=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_on_a_cpu_is_flash(dtype):
    attention, choice = select_backend("auto", replace(PLAIN, dtype=dtype))
    assert attention is flash_attention
    assert (choice.asked, choice.ran) == ("auto", "flash") and "not fused: cuDNN needs" in choice.why


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"dropout": True}, "dropout"),
        ({"segments": True}, "document"),
        ({"packed": True}, "packed"),
        ({"window": (4, 0)}, "window"),
        ({"softcap": 30.0}, "soft-capping"),
        ({"sinks": True}, "sinks"),
    ],
)
def test_what_sdpa_cannot_do_takes_the_plain_backend(extra, reason):
    request = replace(PLAIN, **extra)
    attention, choice = select_backend("auto", request)
    assert attention is unfused_attention and choice.ran == "unfused" and reason in choice.why
    with pytest.raises(ConfigError, match=f"(?s)flash cannot run.*{reason}"):
        select_backend("flash", request)


@pytest.mark.parametrize(
    ("extra", "mend"),
    [
        ({"dropout": True}, "--attention-dropout 0"),
        ({"segments": True}, "no --reset-attention-mask"),
        ({"packed": True, "dropout": True}, "--attention-dropout 0 and no packed documents (--packing)"),
        ({"window": (4, 0)}, "no --window-size"),
        ({"softcap": 30.0}, "no --attn-logit-softcapping"),
        ({"sinks": True}, "--softmax-type vanilla"),
    ],
)
def test_a_refusal_names_what_would_let_the_backend_run(extra, mend):
    with pytest.raises(ConfigError) as caught:
        select_backend("flash", replace(PLAIN, **extra))
    assert caught.value.mend.startswith(f"use {mend}, or --attention-backend auto")
    with pytest.raises(ConfigError) as caught:  # where there is no GPU, nothing in the model helps
        select_backend("fused", replace(PLAIN, **extra))
    assert caught.value.mend.startswith("use --attention-backend auto")


@pytest.mark.parametrize("name", ["unfused", "flash"])
def test_a_named_backend_runs(name):
    attention, choice = select_backend(name, PLAIN)
    assert attention is BACKENDS[name].make(PLAIN) and (choice.asked, choice.ran) == (name, name)
    assert not choice.is_fallback


@pytest.mark.parametrize("name", ["fused", "fastest"])
def test_a_named_backend_that_cannot_run_is_refused(name):
    with pytest.raises(ConfigError, match=f"--attention-backend {name}"):
        select_backend(name, PLAIN)


@pytest.mark.parametrize("name", list(BACKENDS))
def test_fp8_is_refused_by_each_backend_with_its_reason(name):
    assert supports(name, replace(PLAIN, fp8=True)) == BACKENDS[name].no_fp8
    with pytest.raises(ConfigError, match="no attention backend can run"):
        select_backend("auto", replace(PLAIN, fp8=True))


@pytest.mark.parametrize("version", [4, 3, 2])
def test_a_flash_attention_that_is_not_there_is_refused(version):
    with pytest.raises(ConfigError, match=r"(?s)flash cannot run.*flash-attn.* needs an NVIDIA GPU"):
        select_backend("flash", replace(PLAIN, flash_version=version))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_choices_on_a_gpu():
    request = replace(PLAIN, device_type="cuda", head_dim=64, dtype=torch.bfloat16)
    assert select_backend("auto", request)[1].ran == "fused"
    choice = select_backend("auto", replace(request, deterministic=True))[1]
    assert choice.ran in ("flash", "local") and "deterministic" in choice.why
    assert select_backend("auto", replace(request, dtype=torch.float32))[1].ran == "local"  # not measured
    assert select_backend("auto", replace(request, dropout=True))[1].ran == "local"
    with pytest.raises(ConfigError, match="fp16 and bf16, not in float32"):
        select_backend("flash", replace(request, dtype=torch.float32))
    with pytest.raises(ConfigError, match="PyTorch refuses it: head_dim should be a multiple of 8"):
        select_backend("fused", replace(request, head_dim=37))


def test_a_probe_gives_the_reason_each_time_it_is_asked():
    """PyTorch itself says some reasons once a process only; its switch for that is left as it was."""
    before = torch.is_warn_always_enabled()
    first, second = (probe(fused_attention, PLAIN) for _ in range(2))
    assert first == second and len(first) > 20
    assert probe(flash_attention, PLAIN) is None
    assert torch.is_warn_always_enabled() == before


def test_measuring_finds_times_and_says_what_failed():
    def broken(*args, **kwargs):
        raise RuntimeError("out of memory\nmore")

    backends = {"plain": unfused_attention, "flash": flash_attention, "broken": broken}
    found = measure(backends, replace(PLAIN, seq_length=32, batch=2), most_rounds=2)
    assert list(found) == list(backends)
    assert found["broken"].failed == "out of memory"
    assert all(found[name].failed is None and 0 < found[name].total_s < 60 for name in ("plain", "flash"))


class Stopwatch:
    """Stands for the measurement: fixed seconds, and how often it was asked."""

    def __init__(self, **seconds: float | None) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self, backends, request):
        self.calls += 1
        return {
            name: Timing(failed="no") if self.seconds[name] is None else Timing(self.seconds[name], 0.0)
            for name in backends
        }


NAMES = {"flash": "F 1", "local": "L"}
CANDIDATES = {"flash": flash_attention, "local": unfused_attention}


def calibration(path, stopwatch, said=None, machine="card"):
    return Calibration(path, (said if said is not None else []).append, stopwatch, machine)


def test_a_shape_is_measured_once_and_kept(tmp_path):
    path, said = tmp_path / "cache" / "calibration.json", []
    stopwatch = Stopwatch(flash=2.0, local=1.0)
    first = calibration(path, stopwatch, said).seconds(CANDIDATES, NAMES, PLAIN)
    assert first == ({"flash": 2.0, "local": 1.0}, "measured now") and len(said) == 1
    second = calibration(path, stopwatch).seconds(CANDIDATES, NAMES, PLAIN)
    assert second == (first[0], f"from {path}") and stopwatch.calls == 1
    assert [each.name for each in path.parent.iterdir()] == ["calibration.json"]  # nothing is left aside


def test_another_shape_release_or_card_is_measured_again(tmp_path):
    path, stopwatch = tmp_path / "calibration.json", Stopwatch(flash=2.0, local=1.0)
    calibration(path, stopwatch).seconds(CANDIDATES, NAMES, PLAIN)
    calibration(path, stopwatch).seconds(CANDIDATES, NAMES, replace(PLAIN, seq_length=256))
    calibration(path, stopwatch).seconds(CANDIDATES, {**NAMES, "flash": "F 2"}, PLAIN)
    calibration(path, stopwatch, machine="other card").seconds(CANDIDATES, NAMES, PLAIN)
    assert stopwatch.calls == 4
    for machine in ("card", "other card"):  # the older entries are still there
        calibration(path, stopwatch, machine=machine).seconds(CANDIDATES, NAMES, PLAIN)
    assert stopwatch.calls == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 0, "attention": {}}',
        '{"format": 1, "attention": {"card": {"x": {"f": "1"}}}}',
    ],
)
def test_a_broken_file_is_said_and_replaced(tmp_path, text):
    path, said = tmp_path / "calibration.json", []
    path.write_text(text)
    stopwatch = Stopwatch(flash=2.0, local=1.0)
    calibration(path, stopwatch, said).seconds(CANDIDATES, NAMES, PLAIN)
    assert any("cannot be used" in line for line in said) and stopwatch.calls == 1
    assert calibration(path, stopwatch).seconds(CANDIDATES, NAMES, PLAIN)[1].startswith("from")


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    found, _ = calibration(tmp_path / "file" / "c.json", Stopwatch(flash=2.0, local=1.0), said).seconds(
        CANDIDATES, NAMES, PLAIN
    )
    assert found == {"flash": 2.0, "local": 1.0} and any("not kept" in line for line in said)


def test_the_fastest_is_taken_and_all_times_are_told(tmp_path):
    stopwatch = Stopwatch(flash=0.002, unfused=0.001)
    name, why = _fastest(["flash", "unfused"], PLAIN, calibration(tmp_path / "c", stopwatch), "flash")
    assert name == "unfused" and "measured now: unfused 1 ms, flash 2 ms" in why
    failing = Stopwatch(flash=0.002, unfused=None)
    name, why = _fastest(["flash", "unfused"], PLAIN, calibration(tmp_path / "d", failing), "flash")
    assert name == "flash" and "unfused" not in why
    name, _ = _fastest(["flash"], PLAIN, calibration(tmp_path / "e", Stopwatch(flash=None)), "unfused")
    assert name == "unfused"


def test_no_message_sends_a_user_to_tritons_interpreter():
    """As released it ends in a traceback, or is wrong in bf16: only the tests mend it."""
    source = Path(__file__).parents[2] / "src" / "redline"
    for name in ("kernels/common.py", "build/kernels.py"):
        text = (source / name).read_text()
        assert "TRITON_INTERPRET" not in text and "need an NVIDIA GPU" in text


@pytest.mark.parametrize("fault", ["cannot loop up to a scalar", None])
def test_local_by_name_on_a_cpu_asks_whether_the_interpreter_is_right(monkeypatch, fault):
    """What Triton interprets runs only where that computes what a GPU would."""
    monkeypatch.setattr("redline.attention.local.op.why_not_on", lambda device: None)
    monkeypatch.setattr("redline.attention.local.op.why_not_interpreted", lambda: fault)
    if fault is None:
        assert select_backend("local", PLAIN)[1].ran == "local"
        return
    with pytest.raises(ConfigError, match=f"--attention-backend local cannot run[^^]*{fault}"):
        select_backend("local", PLAIN)
