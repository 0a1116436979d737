"""From config to shape: Megatron's defaults, and every preset's published size."""

from dataclasses import replace

import pytest
from formula_shapes import PUBLISHED
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.config import ModelConfig, MoeConfig, MtpConfig, RunConfig, parse_args
from redline.errors import ConfigError
from redline.formulas.params import count_parameters
from redline.formulas.resolve import layer_pattern, padded_vocab_size, shape_of


def model(**values):
    return replace(RunConfig().model, **values)


def test_padded_vocabulary():
    """Megatron's values for GPT-2's vocabulary at tp 1 and 8."""
    assert padded_vocab_size(50257, 128) == 50304
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert shape_of(model(), 64, 50257).padded_vocab_size == 50304
    assert shape_of(model(), 64, 50257, tp=8).padded_vocab_size == 51200
    assert shape_of(model(pad_vocab_size=False), 64, 50257).padded_vocab_size == 50257
    assert shape_of(model(padded_vocab_size=60000), 64, 50257).padded_vocab_size == 60000


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 300), st.integers(1, 16))
def test_padding_is_the_least_multiple(vocab, divisor, tp):
    padded = padded_vocab_size(vocab, divisor, tp)
    assert padded % (divisor * tp) == 0 and 0 <= padded - vocab < divisor * tp


def test_default_mlp_width():
    assert shape_of(model(hidden_size=4096, num_attention_heads=32), 64, 100).ffn == 16384
    swiglu = model(hidden_size=4096, num_attention_heads=32, activation_func="swiglu")
    assert shape_of(swiglu, 64, 100).ffn == 10880
    assert shape_of(replace(swiglu, ffn_hidden_size=11008), 64, 100).ffn == 11008


def test_heads_groups_and_positions():
    shape = shape_of(model(hidden_size=192, num_attention_heads=6, num_query_groups=2), 64, 100)
    assert (shape.num_groups, shape.head_dim, shape.max_positions) == (6, 32, 64)
    grouped = model(hidden_size=192, num_attention_heads=6, num_query_groups=2, group_query_attention=True)
    assert shape_of(replace(grouped, kv_channels=48, max_position_embeddings=512), 64, 100).kv_size == 96
    assert shape_of(replace(grouped, max_position_embeddings=512), 64, 100).max_positions == 512


def test_biases_norms_and_rotary_scaling():
    shape = shape_of(model(add_bias_linear=False, add_qkv_bias=True, qk_layernorm=True), 64, 100)
    assert (shape.bias_linear, shape.bias_qkv, shape.qk_norm) == (False, True, "norm")
    assert shape_of(model(qk_l2_norm=True), 64, 100).qk_norm == "l2"
    assert shape_of(model(), 64, 100).rope_scaling is None
    scaled = shape_of(model(use_rope_scaling=True, rope_scaling_factor=32.0), 64, 100)
    assert scaled.rope_scaling is not None and scaled.rope_scaling.factor == 32.0
    assert shape_of(model(embedding_init_method_std=0.5), 64, 100).embedding_init_std == 0.5
    assert shape_of(model(init_method_std=0.5), 64, 100).embedding_init_std == 0.5


def test_experts_and_depths():
    moe = MoeConfig(num_experts=4, moe_layer_freq="2", moe_shared_expert_intermediate_size=96)
    shape = shape_of(model(num_layers=4), 64, 100, moe=moe, mtp=MtpConfig(mtp_num_layers=2))
    assert (shape.num_experts, shape.moe_ffn, shape.moe_shared_ffn) == (4, shape.ffn, 96)
    assert shape.moe_layer_pattern == (True, False, True, False) and shape.mtp_num_layers == 2
    dense = shape_of(model(), 64, 100, moe=MoeConfig(), mtp=MtpConfig())
    assert (dense.num_experts, dense.moe_ffn, dense.mtp_num_layers) == (0, 0, 0)


def test_layer_patterns():
    assert layer_pattern("1", 3) == (True, True, True)
    assert layer_pattern("([0]*1+[1]*2)", 3) == (False, True, True)
    assert layer_pattern("[0, 1] * 2", 4) == (False, True, False, True)


@pytest.mark.parametrize(
    "text", ["0", "-1", "[0]*2", "[2]*3", "__import__('os')", "[1]*10**9", "1.5", "", "["]
)
def test_bad_layer_patterns(text):
    with pytest.raises(ConfigError, match="moe-layer-freq"):
        layer_pattern(text, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "num-attention-heads 3"),
        (
            {"group_query_attention": True, "num_query_groups": 4, "num_attention_heads": 6},
            "num-query-groups 4",
        ),
        ({"padded_vocab_size": 50}, "padded-vocab-size 50"),
        ({"max_position_embeddings": 8}, "max-position-embeddings 8"),
        ({"hidden_size": 8, "num_attention_heads": 1, "activation_func": "swiglu"}, "hidden-size 8"),
    ],
)
def test_numbers_that_make_no_model(values, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(model(**values), 64, 100)


PRESET_OF = {
    "gpt2": "gpt2-124m",
    "llama3-8b": "llama3-8b",
    "llama3-70b": "llama3-70b",
    "llama3.2-1b": "llama3.2-1b",
    "llama3.2-3b": "llama3.2-3b",
    "qwen3-0.6b": "qwen3-0.6b",
    "qwen3-8b": "qwen3-8b",
}


@pytest.mark.parametrize("name", PRESET_OF)
def test_presets_have_the_published_parameters(name):
    config = parse_args(["--preset", PRESET_OF[name]], training=False).config
    shape = shape_of(config.model, config.train.seq_length, config.model.vocab_size)
    assert count_parameters(shape).total == PUBLISHED[name][1]


def test_every_field_of_the_section_type():
    assert isinstance(model(), ModelConfig)
