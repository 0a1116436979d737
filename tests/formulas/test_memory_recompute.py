"""Memory under recompute: predictions against the tensors that are really alive in a step."""

from dataclasses import replace

import pytest
from formula_shapes import LLAMA3_8B, gpt, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_step import measure

from redline.formulas.activations import (
    MicrobatchShape,
    saved_by_embedding,
    saved_by_head,
    saved_by_layer,
    total_bytes,
    unit_input,
)
from redline.formulas.memory import activation_table, saved_by_layers, training_memory
from redline.formulas.operators import WITHOUT_LOGITS
from redline.formulas.recompute import MODULES, NOTHING, Recompute, full, selective
from redline.formulas.state import StateDtypes

TINY = {"vocab_size": 64, "padded_vocab_size": 64}
SHAPES = {
    "llama": replace(llama(5, 128, 320, 8, 2, 500, 16), **TINY),
    "gpt": replace(gpt(5, 128, 8, 500), **TINY, hidden_dropout=0.1),
    "qk norm": replace(llama(5, 128, 320, 8, 2, 500, 16), **TINY, qk_norm="norm"),
}
CHOICES = {
    **{name: selective([name]) for name in MODULES},
    "every module": selective(MODULES),
    "norm and activation": selective(["layernorm", "activation"]),
    "uniform 1": full("uniform", 1),
    "uniform 2": full("uniform", 2),
    "uniform 5": full("uniform", 5),
    "block 2": full("block", 2),
    "block 2, modules behind": Recompute(modules=frozenset(["mlp"]), unit=1, layers=2),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("case", SHAPES)
def test_prediction_against_live_tensors(case, choice, attention, dtype):
    """Saved bytes within 1 %, the peak within 6 %: what an operation holds for a moment meets gradients."""
    shape = SHAPES[case]
    run = MicrobatchShape(
        seq_length=96, micro_batch_size=2, dtype=dtype, attention=attention, device="cpu",
        recompute=CHOICES[choice],
    )  # fmt: skip
    saved, peak = measure(shape, run, drop=bool(shape.hidden_dropout))
    final_norm = [held for held in saved_by_head(shape, run) if held.site in ("final_norm", "head")]
    predicted = total_bytes([*saved_by_layers(shape, run), *final_norm, *saved_by_embedding(shape, run)])
    assert predicted == pytest.approx(saved, rel=0.01)
    stage = training_memory(shape, run, StateDtypes(param=dtype)).fullest
    assert stage.total - sum(stage.state.values()) == pytest.approx(peak, rel=0.06)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.sampled_from(list(CHOICES)), st.sampled_from(["flash", "unfused"]), st.booleans())
def test_dropping_never_keeps_more(choice, attention, fused):
    kernels = WITHOUT_LOGITS if fused else frozenset()
    run = MicrobatchShape(seq_length=4096, attention=attention, fused=kernels)
    less = replace(run, recompute=CHOICES[choice])
    kept, whole = (total_bytes(saved_by_layers(LLAMA3_8B, each)) for each in (less, run))
    assert kept < whole
    table = activation_table(LLAMA3_8B, less)
    ends = [*saved_by_embedding(LLAMA3_8B, less), *saved_by_head(LLAMA3_8B, less)]
    assert sum(times * held.num_bytes for times, held in table) == kept + total_bytes(ends)
    stage = training_memory(LLAMA3_8B, less, StateDtypes()).fullest  # what it holds when forward has ended
    ended = stage.moments["forward"] - sum(stage.state.values()) - stage.workspace["library"]
    assert ended == kept + total_bytes(ends) and stage.moments["forward"] < stage.total
    needed = [training_memory(LLAMA3_8B, each, StateDtypes()).total for each in (less, run)]
    assert needed[0] < needed[1]


def test_what_full_recompute_keeps():
    """Uniform: an input a unit. Block: an input a layer of the block, everything of the others."""
    run = MicrobatchShape(seq_length=4096, fused=WITHOUT_LOGITS)
    stream, layer = 4096 * LLAMA3_8B.hidden * 2, total_bytes(saved_by_layer(LLAMA3_8B, run))
    assert unit_input(LLAMA3_8B, run).num_bytes == stream
    for choice, units, rest in (
        (full("uniform", 1), 32, 0),
        (full("uniform", 5), 7, 0),
        (full("block", 4), 4, 28),
        (full("block", 40), 32, 0),
        (NOTHING, 0, 32),
    ):
        kept = total_bytes(saved_by_layers(LLAMA3_8B, replace(run, recompute=choice)))
        assert kept == units * stream + rest * layer


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_spread_inputs_are_a_share_each(method):
    """--distribute-saved-activations: a unit's input over tp; one is whole while its unit runs again."""
    run = MicrobatchShape(seq_length=4096, fused=WITHOUT_LOGITS, tp=4, recompute=full(method, 8))
    spread = replace(run, recompute=full(method, 8, spread=True))
    assert 4 * unit_input(LLAMA3_8B, spread).num_bytes == unit_input(LLAMA3_8B, run).num_bytes
    units, stream = len(run.recompute.units(32)), unit_input(LLAMA3_8B, run).num_bytes
    kept, less = (total_bytes(saved_by_layers(LLAMA3_8B, each)) for each in (run, spread))
    assert kept - less == units * stream * 3 // 4
    peak, lower = (training_memory(LLAMA3_8B, each, StateDtypes()).total for each in (run, spread))
    assert 0 < peak - lower <= units * stream * 3 // 4


@pytest.mark.parametrize("recompute", [NOTHING, full("uniform", 1), full("block", 8)])
def test_offloaded_layers_leave_two_of_them_behind(recompute):
    run = MicrobatchShape(seq_length=4096, fused=WITHOUT_LOGITS, recompute=recompute)
    kept = [
        total_bytes(saved_by_layers(LLAMA3_8B, replace(run, offload_layers=layers))) for layers in range(33)
    ]
    assert kept == sorted(kept, reverse=True) and kept[32] > 0
    assert kept[30] == kept[31] == kept[32]
    peaks = [
        training_memory(LLAMA3_8B, replace(run, offload_layers=layers), StateDtypes()).total
        for layers in (0, 16, 32)
    ]
    assert peaks == sorted(peaks, reverse=True)
