"""Attention in place: which kernels of a step count, and that a layer and microbatch is compared with one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.attention.timing import Timing
from redline.bench import in_place
from redline.bench.device import KernelTime
from redline.build import attention_request

LAYERS, MICROBATCHES = 2, 3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What of an opened run is looked at; kernels, clocks and time alone are made up."""
    from redline.config import parse_args
    from redline.hardware import detect
    from redline.plan import make_plan

    words = (
        f"--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 2 --vocab-size 100 --seq-length 64 "
        f"--micro-batch-size 1 --global-batch-size {MICROBATCHES} --train-iters 4 --mock-data --bf16 "
        "--hidden-dropout 0 --attention-dropout 0"
    )
    config = parse_args(words.split()).config
    seen = [
        KernelTime("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90", 6, 4e-3),
        KernelTime("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90", 6, 2e-3),
        KernelTime("nvjet_tst_128x256", 60, 9e-3),
    ]
    monkeypatch.setattr(in_place, "kernel_times", lambda step: [step(), seen][1])
    monkeypatch.setattr(in_place, "clocks", lambda device: {"sm_mhz": 1500.0})
    monkeypatch.setattr(
        in_place, "measure", lambda backends, request: dict.fromkeys(backends, Timing(3e-4, 5e-4))
    )
    monkeypatch.setattr(in_place, "select_backend", lambda name, request: (name, None))
    return SimpleNamespace(
        config=config,
        plan=make_plan(config, detect("cpu"), vocab_size=100),
        device=torch.device("cuda"),
        groups=SimpleNamespace(world=SimpleNamespace(size=1)),
        choices=[SimpleNamespace(what="attention-backend", ran="flash")],
        state=SimpleNamespace(consumed_samples=0),
    )


def test_a_layer_and_microbatch_of_a_step_against_alone(run: Any) -> None:
    steps: list[int] = []
    found = in_place.attention_in_place(run, lambda: steps.append(1))  # type: ignore[arg-type, return-value]
    assert steps == [1] and found is not None
    assert found["in_place_s"] == pytest.approx(6e-3 / (LAYERS * MICROBATCHES))
    assert found["share"] == pytest.approx(8e-4 / 1e-3)
    assert [each["count"] for each in found["kernels"]] == [6, 6], "products are not attention"
    assert found["in_place_flops_per_s"] == pytest.approx(0.8 * found["alone_flops_per_s"])
    assert found["clocks_in_place"] == {"sm_mhz": 1500.0}


def test_nothing_is_said_where_the_work_differs(run: Any) -> None:
    run.choices = [SimpleNamespace(what="attention-backend", ran="unfused")]
    assert in_place.attention_in_place(run, pytest.fail) is None  # type: ignore[arg-type]
    run.choices[0].ran, run.device = "flash", torch.device("cpu")
    assert in_place.attention_in_place(run, pytest.fail) is None  # type: ignore[arg-type]


def test_the_request_is_the_runs_own(run: Any) -> None:
    request = attention_request(run.config, run.plan, run.device)
    assert (request.seq_length, request.batch, request.num_heads, request.dtype) == (64, 1, 2, torch.bfloat16)
    windowed = replace(run.config, model=replace(run.config.model, window_size=(8, 0)))
    plan = replace(run.plan, shape=replace(run.plan.shape, window=(8, 0)))
    assert attention_request(windowed, plan, run.device).window == (8, 0)
