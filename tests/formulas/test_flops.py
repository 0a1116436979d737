"""FLOPs: the 6ND rule without its errors, and both attention conventions."""

from dataclasses import replace

import pytest
from formula_shapes import GPT2, LLAMA3_8B, MIXTRAL, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.formulas.flops import flops_per_step, flops_per_token
from redline.formulas.params import count_parameters, logical_tensors

SETTINGS = settings(max_examples=40, derandomize=True, deadline=None)


def matmul_weights(shape):
    """Elements of every matrix that a token is multiplied by, from the list of tensors."""
    total = 0
    for tensor in logical_tensors(shape):
        if len(tensor.size) < 2 or tensor.name.endswith(".bias") or tensor.name.startswith("embedding."):
            continue
        share = shape.moe_topk / shape.num_experts if tensor.split == "expert" else 1
        total += tensor.numel * share
    heads_that_borrow = shape.mtp_num_layers + shape.tied  # their matrix is another tensor
    return total + heads_that_borrow * shape.vocab_size * shape.hidden


@SETTINGS
@given(shapes(moe=True, mtp=True), st.integers(1, 100))
def test_six_flops_a_weight_and_token(shape, seq_length):
    """All but attention's core is 6 x the matrices a token meets; the core is 12 S q a layer, or half."""
    for convention, per_layer in (("full", 12), ("causal-half", 6)):
        layers = shape.num_layers + shape.mtp_num_layers
        core = per_layer * seq_length * shape.q_size * layers
        total = flops_per_token(shape, seq_length, convention).total
        assert total == pytest.approx(6 * matmul_weights(shape) + core, rel=1e-12)


@SETTINGS
@given(shapes(moe=True, mtp=True), st.integers(1, 100), st.integers(1, 9))
def test_a_step_is_its_tokens(shape, seq_length, batch):
    flops = flops_per_token(shape, seq_length)
    assert flops_per_step(shape, seq_length, batch) == batch * seq_length * flops.total
    assert flops.forward * 3 == flops.total == flops.as_dict()["total"]


@SETTINGS
@given(st.integers(1, 60), st.integers(0, 80))
def test_a_window_counts_the_keys_it_shows(seq_length, before):
    """Against the mask itself; half a causal mask is taken as S/2 of S keys, where a count is (S + 1)/2."""
    windowed = replace(GPT2, window=(before, 0))
    seen = sum(min(i, before) + 1 for i in range(seq_length)) / seq_length
    core = flops_per_token(windowed, seq_length).attention_core / (12 * GPT2.q_size * GPT2.num_layers)
    assert core == pytest.approx(seen, abs=1.01)
    full = flops_per_token(windowed, seq_length, "full").attention_core
    assert full == 12 * GPT2.q_size * GPT2.num_layers * min(seq_length, before + 1)
    if before + 1 >= seq_length:
        assert flops_per_token(windowed, seq_length) == flops_per_token(GPT2, seq_length)


def test_padding_is_no_useful_work():
    padded = replace(GPT2, padded_vocab_size=65536)
    assert flops_per_token(padded, 1024) == flops_per_token(GPT2, 1024)


def test_only_chosen_experts_count():
    """B086: Mixtral at 4096 tokens, top 2, attention in full; counting all experts gives 3.4 times it."""
    assert flops_per_token(MIXTRAL, 4096, "full").total == 82_933_972_992
    assert flops_per_token(replace(MIXTRAL, moe_topk=8), 4096, "full").total == 285_871_177_728


def test_the_embedding_is_a_look_up():
    """B088: an untied model counts only its head; tying the two changes no FLOP."""
    tied = replace(LLAMA3_8B, tied=True)
    assert flops_per_token(tied, 8192) == flops_per_token(LLAMA3_8B, 8192)
    head = flops_per_token(LLAMA3_8B, 8192).head
    assert head == 6 * 4096 * 128256
    layers_only = count_parameters(LLAMA3_8B)
    weights = layers_only.of("attention") + layers_only.of("mlp") + layers_only.of("head")
    flops = flops_per_token(LLAMA3_8B, 8192)
    assert flops.total - flops.attention_core == 6 * weights


def test_conventions_differ_by_the_core_alone():
    half, full = (flops_per_token(LLAMA3_8B, 8192, convention) for convention in ("causal-half", "full"))
    assert full.attention_core == 2 * half.attention_core == 2 * 6 * 8192 * 4096 * 32
    assert full.total - half.total == half.attention_core
