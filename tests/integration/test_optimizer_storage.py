"""Moments in 8 bits, and optimizer states in host memory, beside everything else a run can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.build import compile
from redline.config import Environment
from redline.run import open_run
from redline.step.marks import marked

from .ranks import on_ranks, state_of
from .test_resume import weights
from .tiny import Values, opened, parsed, take_steps

CODED = {
    "bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8",
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
AWAY = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6}
WIDE = {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
FEATURES: dict[str, Values] = {
    "recompute": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
    },
    "fp8": {"fp8_format": "hybrid", "num_layers": 1},
    "packing": {"packing": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}  # fmt: skip
WORDS = "--bf16 --use-precision-aware-optimizer"
EIGHT_BITS = f"{WORDS} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"


def trained(cache: Path, values: Values) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = opened(cache, values)
    return [step.loss for step in take_steps(run)], state_of(run)


def assert_same(left: tuple[list[float], dict[str, Any]], right: tuple[list[float], dict[str, Any]]) -> None:
    assert left[0] == right[0] and left[1].keys() == right[1].keys()
    assert all(torch.equal(left[1][name], right[1][name]) for name in left[1])


@pytest.mark.parametrize("feature", FEATURES)
def test_beside(feature: str, tmp_path: Path) -> None:
    """In host memory or not: the same bits. In 8 bits: six steps within 1 % of the loss with fp32 moments."""
    here = trained(tmp_path, {**CODED, **FEATURES[feature]})
    assert_same(here, trained(tmp_path, {**CODED, **FEATURES[feature], **AWAY}))
    wide, _ = trained(tmp_path, {**CODED, **FEATURES[feature], **WIDE})
    assert here[0] == pytest.approx(wide, rel=0.01) and here[0] != wide


def test_beside_compiled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured operators run one by one: the bits of eager, and the update is no part of a graph."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    found = trained(tmp_path, {**CODED, **AWAY, "use_torch_compile": True})
    assert_same(found, trained(tmp_path, CODED))


def test_on_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Each rank has its own blocks and chunks; in host memory the same bits, the loss near fp32 moments'."""
    tp = {**CODED, "tensor_model_parallel_size": 2}
    variants = [
        {**tp, **more, **place} for more in ({}, {"sequence_parallel": True}) for place in ({}, AWAY, WIDE)
    ]

    def work(environment: Environment) -> list[Any]:
        found = []
        for number, values in enumerate(variants):
            run = open_run(parsed(values), replace(environment, attempt=number), lambda _: None)
            found.append(([step.loss for step in take_steps(run)], state_of(run)))
            run.close()
        return found

    for rank in on_ranks(2, work):
        for here, away, wide in (rank[:3], rank[3:]):
            for name, tensor in here[1].items():
                known = ~tensor.isnan()  # what the other rank holds is not
                assert torch.equal(known, ~away[1][name].isnan())
                assert torch.equal(tensor[known], away[1][name][known])
            assert here[0] == away[0] == pytest.approx(wide[0], rel=0.01)


@pytest.mark.parametrize("place", ["", "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"])
def test_a_checkpoint_knows_no_place(train: Any, place: str) -> None:
    """Saved from the device, or from host memory, and resumed in the other: the uncut run, bit for bit."""
    other = "" if place else "--optimizer-cpu-offload"
    whole = train("whole", EIGHT_BITS)
    train("cut", f"{EIGHT_BITS} {place} --exit-interval 3")
    resumed = train("cut", f"{EIGHT_BITS} {other} --load cut")
    assert resumed.losses == whole.losses
    saved, wanted = weights(resumed), weights(whole)
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("first", "second"), [("fp8", "fp32"), ("fp32", "fp8"), ("bf16", "fp8")])
def test_a_checkpoint_loads_under_another_storage(train: Any, first: str, second: str) -> None:
    """Wider exactly, narrower rounded: the losses that follow stay within 1 %."""
    stored = {name: f"{WORDS} --exp-avg-dtype {name} --exp-avg-sq-dtype {name}" for name in (first, second)}
    whole = train("whole", stored[first])
    train("cut", f"{stored[first]} --exit-interval 3")
    resumed = train("cut", f"{stored[second]} --load cut")
    assert resumed.losses == pytest.approx(whole.losses, rel=0.01)


def test_weights_alone_begin_with_moments_of_zero(train: Any) -> None:
    train("cut", f"{EIGHT_BITS} --exit-interval 3")
    resumed = train("cut", f"{EIGHT_BITS} --load cut --no-load-optim --exit-interval 4")
    assert len(resumed.losses) == 4


def test_copies_are_marked_for_the_ledger(tmp_path: Path) -> None:
    """Both ways are regions of their own, in profiled steps alone."""
    run = opened(tmp_path, {**CODED, **AWAY})
    step, batches = run.make_step(), run.batches()
    with torch.profiler.profile() as profiler, marked(step):
        step(next(batches))
    batches.close()
    names = [event.key for event in profiler.key_averages()]
    assert "redline:module=offload" in names
