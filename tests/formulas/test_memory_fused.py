"""Memory of the fused implementation: predictions against the tensors that are really alive in a step."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from formula_shapes import LLAMA3_8B, gpt, llama
from measured_step import measure
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from mended_interpreter import DEVICE, kernel_device

from redline.formulas.activations import (
    GEMMS,
    MicrobatchShape,
    saved_by_embedding,
    saved_by_head,
    saved_by_layer,
    total_bytes,
)
from redline.formulas.memory import saved_by_layers, training_memory
from redline.formulas.operators import OPERATORS, WITH_LOGITS, WITHOUT_LOGITS
from redline.formulas.recompute import NOTHING, full, selective
from redline.formulas.state import StateDtypes

__all__ = ["kernel_device"]

TINY = {"vocab_size": 64, "padded_vocab_size": 64}
LLAMA = llama(2, 64, 160, 4, 2, 500, 16)
GPT = gpt(2, 64, 4, 500)
CASES = {
    "llama": LLAMA,
    "llama, small vocabulary": replace(LLAMA, **TINY),
    "qk norm": replace(LLAMA, **TINY, qk_norm="norm"),
    "gpt": GPT,
    "geglu with biases": replace(GPT, **TINY, activation="geglu"),
    "hidden dropout": replace(GPT, **TINY, hidden_dropout=0.1),
    "attention dropout": replace(GPT, **TINY, attention_dropout=0.1),
}


@pytest.fixture
def memory_is_freed_at_once(kernel_device, monkeypatch):
    """The interpreter leaves cycles that hold its tensors; collect them, as there are none on a GPU."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def call(self, *args, **kwargs):
        with _disable_current_modes():  # it rounds to fp8 by tensors of its own
            launch(self, *args, **kwargs)
        del args, kwargs
        gc.collect()

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.skipif(
    DEVICE == "cuda", reason="counts tensors on the CPU; `redline bench` compares peaks of a GPU"
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.parametrize("case", CASES)
def test_prediction_against_live_tensors(case, attention, dtype, memory_is_freed_at_once):
    """Saved bytes within 0.5 %, the peak within 3 %."""
    shape = CASES[case]
    if shape.attention_dropout and attention == "flash":
        pytest.skip("this backend takes no dropout")
    drop = bool(shape.hidden_dropout or shape.attention_dropout)
    fused = WITH_LOGITS if case in ("gpt", "llama") and attention == "unfused" else WITHOUT_LOGITS
    run = MicrobatchShape(seq_length=24, dtype=dtype, attention=attention, device="cpu", fused=fused)
    saved, peak = measure(shape, run, drop=drop)
    hidden = run.tokens * shape.hidden * run.item  # the final norm's output, which the caller holds
    final_norm = [held for held in saved_by_head(shape, run) if held.site == "final_norm"]
    layers = saved_by_layer(shape, run) * shape.num_layers
    predicted = total_bytes([*layers, *final_norm, *saved_by_embedding(shape, run)]) + hidden
    assert predicted == pytest.approx(saved, rel=0.005)
    stage = training_memory(shape, run, StateDtypes(param=dtype)).fullest
    assert stage.total - sum(stage.state.values()) == pytest.approx(peak, rel=0.03)


FP8_CASES = {
    "llama": (LLAMA, NOTHING, False, 2),
    "llama, accumulating": (LLAMA, NOTHING, True, 1),
    "llama, norm and activation": (LLAMA, selective(["layernorm", "activation"]), False, 2),
    "llama, cast in each pass": (LLAMA, NOTHING, True, 0),
    "llama, mlp": (LLAMA, selective(["mlp"]), False, 1),
    "gpt": (GPT, NOTHING, False, 1),
    "gpt, uniform": (GPT, full("uniform", 1), False, 1),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="counts tensors on the CPU; benchmarks/gpu_memory.py has peaks")
@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.long if each in ("llama", "gpt") else ()) for each in FP8_CASES],
)
def test_fp8_against_live_tensors(case, memory_is_freed_at_once):
    """Saved bytes within 0.5 %, the peak within 3 %: operands in 8 bits, their transposes, dropped ones."""
    shape, recompute, accumulates, copies = FP8_CASES[case]
    shape = replace(shape, **TINY)
    run = MicrobatchShape(
        seq_length=96, dtype="bf16", attention="flash", device="cpu", fused=WITHOUT_LOGITS, fp8=True,
        recompute=recompute, accumulates=accumulates, fp8_copies=copies,
    )  # fmt: skip
    saved, peak = measure(shape, run)
    hidden = run.tokens * shape.hidden * run.item
    final_norm = [held for held in saved_by_head(shape, run) if held.site == "final_norm"]
    kept = [*saved_by_layers(shape, run), *final_norm, *saved_by_embedding(shape, run)]
    assert total_bytes(kept) + hidden == pytest.approx(saved, rel=0.005)
    stage = training_memory(shape, run, StateDtypes()).fullest
    assert stage.total - sum(stage.state.values()) == pytest.approx(peak, rel=0.03)


def test_every_operator_saves_memory_or_none():
    """Llama-3 8B at 8192 tokens: no operator costs memory, and the loss without logits is never the peak."""
    plain = MicrobatchShape(seq_length=8192)
    total = training_memory(LLAMA3_8B, plain, StateDtypes()).total
    for operator in OPERATORS - {"masked_softmax"}:
        assert (
            training_memory(LLAMA3_8B, replace(plain, fused=frozenset({operator})), StateDtypes()).total
            <= total
        )
    stage = training_memory(LLAMA3_8B, replace(plain, fused=WITHOUT_LOGITS), StateDtypes()).fullest
    assert stage.moments["loss"] - sum(stage.state.values()) < 0.6 * (total - sum(stage.state.values()))
    assert stage.workspace.get("loss", 0) < 1.5 * (1 << 30)


def test_attention_with_a_fused_softmax_keeps_half():
    shape = replace(gpt(2, 64, 4, 1000), attention_dropout=0.0)
    run = MicrobatchShape(seq_length=512, attention="unfused")
    plain = total_bytes(saved_by_layer(shape, run))
    assert total_bytes(saved_by_layer(shape, replace(run, fused=frozenset({"masked_softmax"})))) < 0.6 * plain


@pytest.mark.parametrize("linked", [False, True])
def test_a_gemm_in_bf16_keeps_its_own_rows_in_bf16(linked):
    """Layer by layer: those in fp8 keep what they multiplied, all rows unless these travel in fp8."""
    shape = replace(gpt(4, 64, 4, 64), **TINY)
    every = frozenset(f"layers.{layer}.{gemm}" for layer in range(4) for gemm in GEMMS)
    run = MicrobatchShape(
        seq_length=32, dtype="bf16", fp8=True, fp8_linked=linked, fp8_sites=every, tp=2, sequence=True
    )

    def saved(run):
        return dict(training_memory(shape, run, StateDtypes()).fullest.saved)

    mixed = saved(replace(run, fp8_sites=every - {"layers.1.mlp.fc1", "layers.3.mlp.fc2"}))
    whole, bf16 = saved(run), saved(replace(run, fp8=False))
    rows = 16 if linked else 32
    assert mixed["mlp.fc1"] == (3 * rows + 16 * 2) * 64 and mixed["mlp.fc2"] == (3 + 2) * 32 * shape.ffn // 2
    assert mixed | {"mlp.fc1": whole["mlp.fc1"], "mlp.fc2": whole["mlp.fc2"]} == whole
    first = saved(replace(run, fp8_sites=frozenset(f"layers.0.{gemm}" for gemm in GEMMS)))
    assert {name: 3 * bf16[name] + whole[name] for name in bf16} == {name: 4 * first[name] for name in first}


def test_the_peak_is_not_always_in_the_last_layer():
    """A last layer in bf16 needs no product in fp8 beside main_grad; the one before it does."""
    three = replace(gpt(3, 64, 4, 64), **TINY)
    run = MicrobatchShape(seq_length=8, dtype="bf16", fp8=True, accumulates=True)
    sites = frozenset(f"layers.{layer}.{gemm}" for layer in range(3) for gemm in GEMMS)
    moving = []
    for shape in (three, replace(three, num_layers=4)):
        stage = training_memory(shape, replace(run, fp8_sites=sites), StateDtypes()).fullest
        moving.append(stage.moments["mlp"] - sum(stage.state.values()))
    assert moving[0] == moving[1]
