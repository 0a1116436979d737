"""Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388), dense, by their base models' configurations."""

from typing import Any


def _qwen(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, *, tied: bool, **more: Any
) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": groups,
        "max_position_embeddings": 32768,
        "seq_length": 4096,
        "activation_func": "swiglu",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "rotary_base": 1000000.0,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not tied,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **more,
    }


SMALL = {"add_qkv_bias": True, "vocab_size": 151936}
LONG = {"max_position_embeddings": 131072}
LARGE = {"add_qkv_bias": True, "vocab_size": 152064, **LONG}
QWEN3 = {"qk_layernorm": True, "kv_channels": 128, "vocab_size": 151936}

QWEN = {
    "qwen2.5-0.5b": _qwen(24, 896, 4864, 14, 2, tied=True, **SMALL),
    "qwen2.5-1.5b": _qwen(28, 1536, 8960, 12, 2, tied=True, **SMALL, **LONG),
    "qwen2.5-3b": _qwen(36, 2048, 11008, 16, 2, tied=True, **SMALL),
    "qwen2.5-7b": _qwen(28, 3584, 18944, 28, 4, tied=False, **LARGE),
    "qwen2.5-14b": _qwen(48, 5120, 13824, 40, 8, tied=False, norm_epsilon=1e-5, **LARGE),
    "qwen2.5-32b": _qwen(64, 5120, 27648, 40, 8, tied=False, norm_epsilon=1e-5, **LARGE),
    "qwen2.5-72b": _qwen(80, 8192, 29568, 64, 8, tied=False, norm_epsilon=1e-5, **LARGE),
    "qwen3-0.6b": _qwen(28, 1024, 3072, 16, 8, tied=True, **QWEN3),
    "qwen3-1.7b": _qwen(28, 2048, 6144, 16, 8, tied=True, **QWEN3),
    "qwen3-4b": _qwen(36, 2560, 9728, 32, 8, tied=True, **QWEN3),
    "qwen3-8b": _qwen(36, 4096, 12288, 32, 8, tied=False, **QWEN3),
    "qwen3-14b": _qwen(40, 5120, 17408, 40, 8, tied=False, **QWEN3),
    "qwen3-32b": _qwen(64, 5120, 25600, 64, 8, tied=False, **QWEN3),
}
