"""Llama 2 (arXiv 2307.09288), Llama 3, 3.1 (arXiv 2407.21783) and 3.2, by their published configurations."""

from typing import Any


def llama(layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        **({"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}),
        "activation_func": "swiglu",
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **more,
    }


LLAMA2 = {"vocab_size": 32000, "max_position_embeddings": 4096, "seq_length": 4096}
LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "seq_length": 8192, "rotary_base": 500000.0}
LLAMA31 = {**LLAMA3, "max_position_embeddings": 131072, "use_rope_scaling": True}
LLAMA32 = {**LLAMA31, "rope_scaling_factor": 32.0, "untie_embeddings_and_output_weights": False}

LLAMA = {
    "llama2-7b": llama(32, 4096, 11008, 32, 32, **LLAMA2),
    "llama2-70b": llama(80, 8192, 28672, 64, 8, **LLAMA2),
    "llama3-8b": llama(32, 4096, 14336, 32, 8, **LLAMA3),
    "llama3-70b": llama(80, 8192, 28672, 64, 8, **LLAMA3),
    "llama3.1-8b": llama(32, 4096, 14336, 32, 8, **LLAMA31),
    "llama3.1-70b": llama(80, 8192, 28672, 64, 8, **LLAMA31),
    "llama3.1-405b": llama(126, 16384, 53248, 128, 8, **LLAMA31),
    "llama3.2-1b": llama(16, 2048, 8192, 32, 8, **LLAMA32),
    "llama3.2-3b": llama(28, 3072, 8192, 24, 8, **LLAMA32),
}
