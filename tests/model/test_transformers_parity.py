"""The same weights give the logits of `transformers`: GPT-2, Llama (also scaled), Qwen2, Qwen3, gpt-oss.

fp32, 1e-5: two layers of products over at most 48 terms, logits of order 1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_cases import make_model, make_shape
from torch import Tensor

from redline.attention import MaskSpec
from redline.formulas.shape import ModelShape, RopeScaling
from redline.model import logical_tensors

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

SIZES = {"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_SIZES = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-5,
}
BLOCK = {
    "attention.norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.proj": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
OUTSIDE = {
    "embedding.word.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
GPT2_BLOCK = {
    "attention.norm": "ln_1",
    "attention.proj": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.up": "mlp.c_fc",
}
GPT2_BLOCK["mlp.down"] = "mlp.c_proj"


def llama_tensor(weights: dict[str, Tensor], logical: str) -> Tensor:
    if logical in OUTSIDE:
        return weights[OUTSIDE[logical]]
    _, layer, module, which, kind = logical.split(".")
    return weights[f"model.layers.{layer}.{BLOCK[f'{module}.{which}']}.{kind}"]


def gpt2_tensor(weights: dict[str, Tensor], logical: str) -> Tensor:
    """Its matrices are stored input first, and q, k, v in one."""
    outside = {"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"}
    stem, _, kind = logical.rpartition(".")
    if stem in outside:
        return weights[f"transformer.{outside[stem]}.{kind}"]
    _, layer, module, which = stem.split(".")
    if which in "qkv":
        return weights[f"transformer.h.{layer}.attn.c_attn.{kind}"].t().chunk(3)["qkv".index(which)]
    tensor = weights[f"transformer.h.{layer}.{GPT2_BLOCK[f'{module}.{which}']}.{kind}"]
    return tensor.t()


def check(
    shape: ModelShape, theirs: torch.nn.Module, find: Callable[[dict[str, Tensor], str], Tensor], device: str
) -> None:
    theirs = theirs.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():  # weights large enough that every part of the block matters
            noise = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.3)
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    model, used = make_model(shape, torch.float32, device), set()
    weights = theirs.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for logical, view in logical_tensors(name, parameter, shape).items():
                found = find(weights, logical)
                used.add(found.untyped_storage().data_ptr())
                view.copy_(found)
    unused = {name for name, tensor in weights.items() if tensor.untyped_storage().data_ptr() not in used}
    assert all(".router." in name for name in unused), unused
    tokens = torch.randint(0, 53, (2, 29), generator=generator)
    with torch.no_grad():
        want = theirs(tokens).logits
        positions = torch.arange(29, device=device).expand(2, -1)
        got = model.logits(model(tokens.to(device), positions, MaskSpec())).transpose(0, 1)
    assert want.abs().max() > 0.5
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def test_gpt2(device):
    config = transformers.GPT2Config(
        vocab_size=53, n_positions=32, n_embd=24, n_layer=2, n_head=4, n_inner=40
    )
    shape = make_shape("gpt2", head_dim=6)
    check(shape, transformers.GPT2LMHeadModel(config), gpt2_tensor, device)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_llama(scaled, tied, device):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    scaling = RopeScaling(factor=8.0, original_max_positions=16) if scaled else None
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    config = transformers.LlamaConfig(**LLAMA_SIZES, rope_parameters=rope, tie_word_embeddings=tied)
    shape = make_shape("llama", tied=tied, rope_scaling=scaling)
    check(shape, transformers.LlamaForCausalLM(config), llama_tensor, device)


def test_qwen2(device):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = transformers.Qwen2Config(**LLAMA_SIZES, rope_parameters=rope, tie_word_embeddings=False)
    shape = make_shape("qwen2", rotary_base=1e6)
    check(shape, transformers.Qwen2ForCausalLM(config), llama_tensor, device)


def test_qwen3(device):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = transformers.Qwen3Config(**LLAMA_SIZES, rope_parameters=rope, tie_word_embeddings=True)
    shape = make_shape("qwen3", rotary_base=1e6)
    check(shape, transformers.Qwen3ForCausalLM(config), llama_tensor, device)


def gpt_oss_tensor(weights: dict[str, Tensor], logical: str) -> Tensor:
    """Its matrices of an expert are stored input first, gate and up in turn."""
    stem, _, kind = logical.rpartition(".")
    layer, _, which = stem.removeprefix("layers.").partition(".")
    if which == "attention":
        return weights[f"model.layers.{layer}.self_attn.sinks"]
    if not which.startswith("mlp") or which == "mlp.norm":
        return llama_tensor(weights, logical)
    name = "down_proj" if which == "mlp.down" else "gate_up_proj"
    tensor = weights[f"model.layers.{layer}.mlp.experts.{name}{'_bias' if kind == 'bias' else ''}"][0].t()
    return tensor if which == "mlp.down" else tensor[which == "mlp.up" :: 2]


def test_gpt_oss_of_one_expert(device):
    """One expert is a dense MLP: its router's softmax is over one score. The limit is where it is met."""
    config = transformers.GptOssConfig(
        **LLAMA_SIZES, num_local_experts=1, num_experts_per_tok=1, swiglu_limit=0.5,
        tie_word_embeddings=False, layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    biased = {"bias_linear": True, "bias_qkv": True, "softmax_type": "learnable"}
    shape = make_shape("limited", **biased, softmax_scale=None)
    check(shape, transformers.GptOssForCausalLM(config), gpt_oss_tensor, device)
