"""Presets: names of options, rules kept, and the published sizes."""

from __future__ import annotations

import pytest

from redline.config import PRESETS, ModelConfig, parse_args
from redline.config.tree import options_by_field

# Parameters of the published checkpoints (model cards and safetensors indices), tied weights counted once.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
}


def parameters(model: ModelConfig) -> int:
    """Counted here from first principles, apart from formulas/."""
    h, heads = model.hidden_size, model.num_attention_heads
    groups = model.num_query_groups or heads
    d = model.kv_channels or h // heads
    f = model.ffn_hidden_size or 4 * h
    gated = model.activation_func == "swiglu"
    q, kv = heads * d, groups * d
    matrices = h * (q + 2 * kv) + q * h + h * f * (3 if gated else 2)
    norm = h if model.normalization == "RMSNorm" else 2 * h
    biases = (q + 2 * kv) + h + f + h if model.add_bias_linear else (q + 2 * kv) if model.add_qkv_bias else 0
    layer = matrices + biases + 2 * norm + (2 * d if model.qk_layernorm else 0)
    assert model.vocab_size is not None
    vocab = model.vocab_size * h * (2 if model.untie_embeddings_and_output_weights else 1)
    learned = model.position_embedding_type == "learned_absolute"
    return model.num_layers * layer + vocab + norm + (model.max_position_embeddings or 0) * h * learned


@pytest.mark.parametrize("name", PRESETS)
def test_presets_set_options_and_keep_the_rules(name: str) -> None:
    table = options_by_field()
    assert all(table[field].fault(value) == "" for field, value in PRESETS[name].items())
    assert all(table[field].state == "active" for field in PRESETS[name])
    assert {"num_layers", "hidden_size", "num_attention_heads", "seq_length"} <= PRESETS[name].keys()
    length = [] if "train_iters" in PRESETS[name] else ["--train-iters", "5"]
    config = parse_args(["--preset", name, *length]).config
    assert config.model.preset == name
    for field, value in PRESETS[name].items():
        assert getattr(getattr(config, table[field].section), field) == value


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert parameters(parse_args(["--preset", name, "--train-iters", "5"]).config.model) == published


def test_gpt3_sizes() -> None:
    """The paper rounds; 174.6 and 1.31 billion are what its shapes give."""
    for name, billions in (("gpt3-175b", 174.6), ("gpt-1.3b", 1.314)):
        model = parse_args(["--preset", name, "--train-iters", "5"]).config.model
        assert parameters(model) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_rotary_settings_of_the_families() -> None:
    def model(name: str) -> ModelConfig:
        return parse_args(["--preset", name, "--train-iters", "5"]).config.model

    assert model("llama2-7b").rotary_base == 1e4
    assert (model("llama3-8b").rotary_base, model("llama3-8b").use_rope_scaling) == (5e5, False)
    assert (model("llama3.1-8b").use_rope_scaling, model("llama3.1-8b").rope_scaling_factor) == (True, 8.0)
    assert model("llama3.2-1b").rope_scaling_factor == 32.0
    assert (model("qwen3-8b").rotary_base, model("qwen3-8b").norm_epsilon) == (1e6, 1e-6)
    assert model("qwen2.5-72b").norm_epsilon == 1e-5
