"""Logical tensors inside parameters: complete, disjoint, in order; counted as the formulas count them."""

from __future__ import annotations

import pytest
import torch
from model_cases import KINDS, make_model, make_shape

from redline.attention import unfused_attention
from redline.errors import ShapeError
from redline.formulas.params import count_parameters, physical_sizes
from redline.model import Transformer, logical_tensors, shard_table
from redline.model.shard_table import check_names


def meta_model(shape) -> Transformer:
    return Transformer(shape, attention=unfused_attention, dtype=torch.float32)


@pytest.mark.parametrize("kind", list(KINDS))
def test_parts_cover_each_parameter_once(kind):
    shape = make_shape(kind)
    model = make_model(shape)
    names = set()
    for name, parameter in model.named_parameters():
        marks = torch.zeros_like(parameter)
        for logical, view in logical_tensors(name, marks, shape).items():
            assert logical not in names
            names.add(logical)
            view += 1
        rows = shape.vocab_size if shard_table(shape)[name].split == "vocab" else parameter.shape[0]
        assert (marks[:rows] == 1).all() and not marks[rows:].any(), name


@pytest.mark.parametrize("kind", list(KINDS))
def test_parameters_are_those_of_the_formulas(kind):
    """True sizes count the vocabulary without its padding, stored sizes with it."""
    shape = make_shape(kind)
    model = meta_model(shape)
    stored = [parameter.numel() for parameter in model.parameters()]
    assert sorted(stored) == sorted(physical_sizes(shape).values())
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.hidden * (1 if shape.tied else 2)
    assert sum(stored) - padding == count_parameters(shape).total


def test_stacking_order_and_splits():
    shape = make_shape("qwen2", bias_linear=True)
    qkv = torch.arange(64)
    views = logical_tensors("layers.1.attention.qkv.bias", qkv, shape)
    assert {name: (int(view[0]), len(view)) for name, view in views.items()} == {
        "layers.1.attention.q.bias": (0, 32),
        "layers.1.attention.k.bias": (32, 16),
        "layers.1.attention.v.bias": (48, 16),
    }
    fc1 = logical_tensors("layers.0.mlp.fc1.weight", torch.zeros(80, 24), shape)
    assert list(fc1) == ["layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"]
    assert list(logical_tensors("layers.0.mlp.fc2.weight", torch.zeros(24, 40), shape)) == [
        "layers.0.mlp.down.weight"
    ]
    table = shard_table(shape)
    splits = {
        "embedding.word.weight": "vocab",
        "head.weight": "vocab",
        "final_norm.weight": "replicated",
        "layers.0.attention.qkv.weight": "column",
        "layers.0.attention.qkv.bias": "column",
        "layers.0.attention.proj.weight": "row",
        "layers.0.attention.proj.bias": "replicated",
        "layers.0.mlp.fc1.bias": "column",
        "layers.0.mlp.fc2.weight": "row",
        "layers.0.mlp.fc2.bias": "replicated",
    }
    assert {name: table[name].split for name in splits} == splits


def test_names_that_do_not_match_are_an_error():
    shape = make_shape("llama")
    with pytest.raises(ShapeError, match=r"has no parameter layers\.9\.mlp"):
        logical_tensors("layers.9.mlp.fc1.weight", torch.zeros(80, 24), shape)
    with pytest.raises(ShapeError, match="cannot hold"):
        logical_tensors("layers.0.mlp.fc1.weight", torch.zeros(79, 24), shape)
    with pytest.raises(ShapeError, match=r"only in the model: \['stray'\]; only in the table: \[\]"):
        check_names([*shard_table(shape), "stray"], shape)


LLAMA3_8B = {
    "num_layers": 32,
    "hidden": 4096,
    "ffn": 14336,
    "num_heads": 32,
    "num_groups": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "padded_vocab_size": 128256,
}
GPT2_SMALL = {
    "num_layers": 12,
    "hidden": 768,
    "ffn": 3072,
    "num_heads": 12,
    "num_groups": 12,
    "head_dim": 64,
    "vocab_size": 50257,
    "padded_vocab_size": 50257,
    "max_positions": 1024,
}


@pytest.mark.parametrize(
    ("kind", "sizes", "numel"), [("llama", LLAMA3_8B, 8_030_261_248), ("gpt2", GPT2_SMALL, 124_439_808)]
)
def test_published_parameter_counts(kind, sizes, numel):
    """Llama-3 8B (B081) and GPT-2 small, from the model itself, on the meta device."""
    model = meta_model(make_shape(kind, **sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) == numel
