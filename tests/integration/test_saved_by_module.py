"""What the first step counts of saved activations, module by module, against the formulas."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.cli.main import main
from redline.config import Environment, parse_args
from redline.formulas.saved import MODULES
from redline.run import OpenRun, open_run
from redline.run.memory import MemoryMeter, count_saved, measured_activations
from redline.step import StepOutcome
from redline.step.saved import SavedCount, count_next_step

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from mended_interpreter import DEVICE, kernel_device

from .conftest import Run
from .tiny import opened, parsed

__all__ = ["kernel_device"]

GPT = {"seq_length": 48, "global_batch_size": 2, "eval_iters": 0, "device": "cpu"}
LLAMA = {
    **GPT, "normalization": "RMSNorm", "activation_func": "swiglu", "position_embedding_type": "rope",
    "group_query_attention": True, "num_query_groups": 2, "add_bias_linear": False, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "untie_embeddings_and_output_weights": True, "bf16": True,
    "ffn_hidden_size": 80,
}  # fmt: skip
FP8 = {**LLAMA, "fp8_format": "hybrid"}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


CASES = {
    "gpt": {**GPT, "global_batch_size": 4},
    "gpt, norm, activation and attention again": {**GPT, **selective("layernorm", "activation", "core_attn")},
    "gpt, a unit": {
        **GPT, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1,
    },
    "gpt, units in host memory": {
        **GPT, "seq_length": 128, "recompute_granularity": "full", "recompute_method": "block",
        "recompute_num_layers": 1, "cpu_offloading": True, "cpu_offloading_num_layers": 2, "num_layers": 3,
    },
    "llama": LLAMA,
    "llama, fp32, mlp again": {**LLAMA, "bf16": False, **selective("mlp")},
    "llama, q and k normed, packed": {**LLAMA, "qk_layernorm": True, "packing": True},
    "llama, a layer in host memory": {
        **LLAMA, "seq_length": 256, "cpu_offloading": True, "cpu_offloading_num_layers": 1,
    },
    "fp8": FP8,
    "fp8, norm and activation again": {**FP8, **selective("layernorm", "activation")},
    "fp8, first and last layer in bf16, fc2 of no multiple": {
        **FP8, "num_layers": 3, "first_last_layers_bf16": True, "ffn_hidden_size": 72,
    },
    "fp8, some in bf16, norm and activation again": {
        **FP8, **selective("layernorm", "activation"),
        "fp8_keep_bf16": ("*.attention.proj", "layers.0.*.qkv", "layers.1.mlp.fc1", "layers.0.mlp.fc2"),
    },
}  # fmt: skip
FUSED = {
    "gpt": {**GPT, "hidden_dropout": 0.1, "attention_dropout": 0.0},
    "llama": {**LLAMA, "fused_residual_rmsnorm": True},
    "fp8, proj and fc2 in bf16": {**FP8, "fp8_keep_bf16": ("*.proj", "*.fc2")},
    "fp8": FP8,
}


def first_step(run: OpenRun, count: int = 1) -> tuple[SavedCount, list[StepOutcome]]:
    step, batches = run.make_step(), run.batches()
    saved = count_saved(step, run.config)
    assert isinstance(saved, SavedCount)
    try:
        return saved, [step(next(batches)) for _ in range(count)]
    finally:
        batches.close()


def compare(run: OpenRun, saved: SavedCount) -> None:
    """Every module within 1 %, but for copies of gains and biases and scales of fp8, a few hundred bytes."""
    predicted, shape = run.plan.memory.fullest.saved, run.plan.shape
    vectors = 2 * 4 * shape.num_layers * shape.hidden + 8 * 4
    for name in MODULES:
        wanted, found = predicted.get(name, 0), saved.by_module.get(name, 0)
        assert found == pytest.approx(wanted, rel=0.01, abs=vectors), name
    assert found and list(saved.by_module) == [name for name in MODULES if name in saved.by_module]


@pytest.mark.parametrize("case", CASES)
def test_plain_modules(case: str, tmp_path: Path) -> None:
    run = opened(tmp_path, CASES[case])
    compare(run, first_step(run)[0])


class EnoughError(Exception):
    """The forward pass has ended."""


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels are interpreted here")
@pytest.mark.parametrize("case", FUSED)
def test_fused_modules(
    case: str, tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step that fails leaves no hook behind."""

    def stop(meter: MemoryMeter) -> None:
        raise EnoughError

    monkeypatch.setattr(MemoryMeter, "after_forward", stop)
    small = {"global_batch_size": 1, "micro_batch_size": 1, "num_layers": 1, "seq_length": 32}
    environment = Environment(cache_dir=tmp_path, omp_num_threads=1, triton_interpret=True)
    run = open_run(parsed({**FUSED[case], "transformer_impl": "fused", **small}), environment, lambda _: None)
    step, batches = run.make_step(), run.batches()
    saved = count_next_step(step)
    with pytest.raises(EnoughError):
        step(next(batches))
    batches.close()
    compare(run, saved)
    assert not any(module._forward_hooks for module in run.state.model.modules())


def test_later_steps_know_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step alone makes calls; its results are those without, and every object is left as it was."""
    plain = opened(tmp_path, GPT)
    step, batches = plain.make_step(), plain.batches()
    losses = [step(next(batches)).loss for _ in range(3)]
    calls: list[str] = []
    for name in ("begins", "inside", "saw", "ends"):
        call = getattr(SavedCount, name)
        monkeypatch.setattr(
            SavedCount, name, lambda *args, name=name, call=call: (calls.append(name), call(*args))[1]
        )
    run = opened(tmp_path, GPT)
    step, batches = run.make_step(), run.batches()
    before = dict(vars(step))
    saved = count_next_step(step)
    outcomes = [step(next(batches))]
    seen = len(calls)
    assert {"begins", "inside", "saw", "ends"} <= set(calls) and saved.by_module
    assert vars(step).keys() == before.keys()
    for module in run.state.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not {"_accumulate", "loss", "split"} & vars(module).keys()
    outcomes += [step(next(batches)) for _ in range(2)]
    assert len(calls) == seen, "not one call in another step"
    assert [each.loss for each in outcomes] == losses
    for mine, other in zip(run.state.model.parameters(), plain.state.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--use-torch-compile", "torch.compile"),
        ("--transformer-impl transformer_engine", "transformer-engine"),
    ],
)
def test_what_cannot_be_known_is_said(flags: str, says: str) -> None:
    saved = count_saved(None, parse_args([*flags.split(), "--train-iters", "1"]).config)  # type: ignore[arg-type]
    document = measured_activations(saved)
    assert isinstance(saved, str) and says in saved
    assert document == {"by_module": None, "unknown": saved}
    assert measured_activations(None) is None


def test_a_run_shows_it_everywhere(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """summary.json, the table at the end, `redline memory --against`, the page; profiled in the same step."""
    run: Run = train("run", "--train-iters 1 --profile-ledger --save-interval 9 --no-save-optim")
    summary = run.summary
    found = summary["measured_activations"]["by_module"]
    assert found["attention.core"] == summary["predicted_memory"]["saved"]["attention.core"] > 0
    assert "saved by mlp.fc2" in run.output and (run.folder / "ledger.json").exists()
    assert main(["memory", "--against", str(run.folder)]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "saved by attention.core" in line)
    assert line.split()[-4:-2] == line.split()[-2:]
    assert main(["memory", "--against", str(run.folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["against"]["measured_activations"]["by_module"] == found
    assert document["memory"]["saved"] == summary["predicted_memory"]["saved"]
