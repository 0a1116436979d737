"""Parameters: published counts to the unit, and sums written down a second way."""

from dataclasses import replace

import pytest
from formula_shapes import GPT2, LLAMA3_8B, MIXTRAL, PUBLISHED, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.formulas.params import (
    count_parameters,
    layer_parameters,
    logical_tensors,
    physical_sizes,
    rank_parameters,
    stage_layers,
    stored_elements,
)

SETTINGS = settings(max_examples=40, derandomize=True, deadline=None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    shape, count = PUBLISHED[name]
    assert count_parameters(shape).total == count


def by_hand(shape):
    """The same total as closed formulas, none of them shared with the room."""
    h, f, v = shape.hidden, shape.ffn, shape.vocab_size
    norm = h * (2 if shape.normalization == "LayerNorm" else 1)
    attention = h * (shape.q_size + 2 * shape.kv_size) + shape.q_size * h
    attention += (shape.q_size + 2 * shape.kv_size) * shape.bias_qkv + h * shape.bias_linear
    attention += (2 * norm * shape.head_dim // h) * (shape.qk_norm == "norm")

    def mlp(width):
        ups = 2 if shape.gated else 1
        return (ups + 1) * h * width + (ups * width + h) * shape.bias_linear

    experts = shape.num_experts * mlp(shape.moe_ffn) + h * shape.num_experts
    if shape.moe_shared_ffn:
        experts += mlp(shape.moe_shared_ffn)
    total = v * h + (shape.max_positions * h if shape.position == "learned_absolute" else 0)
    pattern = shape.moe_layer_pattern or (bool(shape.num_experts),) * shape.num_layers
    for has_experts in (*pattern, *(pattern[-1],) * shape.mtp_num_layers):
        total += attention + 2 * norm + (experts if has_experts else mlp(f))
    total += shape.mtp_num_layers * (3 * norm + 2 * h * h)
    return total + norm + (0 if shape.tied else v * h)


@SETTINGS
@given(shapes())
def test_dense_models(shape):
    assert count_parameters(shape).total == by_hand(shape)


@SETTINGS
@given(shapes(moe=True, mtp=True))
def test_models_with_experts_and_prediction_heads(shape):
    assert count_parameters(shape).total == by_hand(shape)


@SETTINGS
@given(shapes(moe=True, mtp=True))
def test_parts_layers_and_active_add_up(shape):
    count = count_parameters(shape)
    assert sum(part for _, part in count.by_part) == count.total
    layers = sum(layer_parameters(shape, layer) for layer in range(shape.num_layers))
    outside = sum(tensor.numel for tensor in logical_tensors(shape) if tensor.layer is None)
    assert layers + outside == count.total
    everyone = replace(shape, moe_topk=shape.num_experts)
    assert count_parameters(everyone).active == count.total
    assert count.active <= count.total


@SETTINGS
@given(shapes(moe=True))
def test_storage_merges_and_pads(shape):
    """Merging moves nothing; only vocabulary rows are added, and rounding is by parameter."""
    sizes = physical_sizes(shape)
    tables = 1 if shape.tied else 2
    padding = tables * (shape.padded_vocab_size - shape.vocab_size) * shape.hidden
    assert sum(sizes.values()) == count_parameters(shape).total + padding
    assert not any(name.endswith((".q.weight", ".gate.weight")) and "experts" not in name for name in sizes)
    assert stored_elements(shape, 64) == sum((size + 63) // 64 * 64 for size in sizes.values())


def test_logical_names_are_those_of_the_checkpoints():
    names = [tensor.name for tensor in logical_tensors(replace(GPT2, num_layers=1))]
    assert names == [
        "embedding.word.weight",
        "embedding.position.weight",
        "layers.0.attention.norm.weight",
        "layers.0.attention.norm.bias",
        "layers.0.attention.q.weight",
        "layers.0.attention.q.bias",
        "layers.0.attention.k.weight",
        "layers.0.attention.k.bias",
        "layers.0.attention.v.weight",
        "layers.0.attention.v.bias",
        "layers.0.attention.proj.weight",
        "layers.0.attention.proj.bias",
        "layers.0.mlp.norm.weight",
        "layers.0.mlp.norm.bias",
        "layers.0.mlp.up.weight",
        "layers.0.mlp.up.bias",
        "layers.0.mlp.down.weight",
        "layers.0.mlp.down.bias",
        "final_norm.weight",
        "final_norm.bias",
    ]
    qwen = [tensor.name for tensor in logical_tensors(replace(LLAMA3_8B, num_layers=1, qk_norm="norm"))]
    assert {"layers.0.attention.q_norm.weight", "layers.0.mlp.gate.weight", "head.weight"} <= set(qwen)


def test_expert_weights_are_divided_by_expert_ranks():
    """B079: Mixtral at TP 4, EP 8: a GPU holds an eighth of the experts, a quarter of the rest, all norms."""
    count = count_parameters(MIXTRAL)
    (held,) = rank_parameters(MIXTRAL, tp=4, ep=8, etp=1)
    assert held.experts == count.of("experts") // 8
    assert held.replicated == count.of("norm") + count.of("router")
    assert held.sharded == (count.total - count.of("experts") - held.replicated) // 4
    (by_tp,) = rank_parameters(MIXTRAL, tp=4, ep=8)  # expert tensor parallelism defaults to tp
    assert by_tp.experts == count.of("experts") // 32


@SETTINGS
@given(shapes(moe=True, mtp=True), st.integers(1, 5))
def test_stages_share_everything_once(shape, pp):
    """Over the stages of one pipeline nothing is lost; only a tied table is held twice."""
    held = sum(stage.total for stage in rank_parameters(shape, pp=pp))
    twice = shape.padded_vocab_size * shape.hidden if shape.tied and pp > 1 else 0
    assert held == sum(physical_sizes(shape).values()) + twice


def test_stage_layers():
    assert [len(layers) for layers in stage_layers(10, 4)] == [3, 3, 2, 2]
    assert [layer for layers in stage_layers(10, 4) for layer in layers] == list(range(10))
