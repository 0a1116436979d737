"""Memory of the fused implementation: predictions against the tensors that are really alive in a step."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from formula_shapes import LLAMA3_8B, gpt, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_step import measure

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from mended_interpreter import DEVICE, kernel_device

from redline.formulas.activations import (
    GEMM_TILE,
    LOGITS_BYTES,
    MicrobatchShape,
    loss_chunk_tokens,
    saved_by_embedding,
    saved_by_head,
    saved_by_layer,
    total_bytes,
)
from redline.formulas.memory import training_memory
from redline.formulas.operators import OPERATORS, WITH_LOGITS, WITHOUT_LOGITS
from redline.formulas.state import StateDtypes
from redline.kernels.linear_cross_entropy import op as linear_cross_entropy

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


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(1, 70_000), st.integers(2, 300_000), st.sampled_from([2, 4]))
def test_chunks_are_those_of_the_operator(tokens, vocab_size, item):
    """The formula and the operator state the same size, so that a prediction cannot drift from what runs."""
    assert loss_chunk_tokens(tokens, vocab_size, item) == linear_cross_entropy.default_chunk_tokens(
        tokens, vocab_size, item
    )
    assert (LOGITS_BYTES, GEMM_TILE) == (linear_cross_entropy.LOGITS_BYTES, linear_cross_entropy.GEMM_TILE)


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
