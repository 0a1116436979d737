"""GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020, arXiv 2005.14165, table 2.1).

GPT-2 was trained with dropout 0.1 everywhere; the GPT-3 paper names none. GPT-3's XL model has 16 heads of
128 here, as 2048 channels allow (the table's 24 do not divide them).
"""

from typing import Any


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        "seq_length": 1024,
    }


def _gpt3(
    num_layers: int, hidden_size: int, num_attention_heads: int, init_method_std: float
) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "seq_length": 2048,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": init_method_std,
    }


GPT = {
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "gpt-1.3b": _gpt3(24, 2048, 16, 0.02),
    # The standard deviation of Megatron-LM's own script for this model.
    "gpt3-175b": _gpt3(96, 12288, 96, 0.006),
}
