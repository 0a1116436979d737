"""Mistral 7B (arXiv 2310.06825) as of version 0.3, which attends to the whole sequence (0.1 had a window)."""

from redline.config.presets.llama import llama

MISTRAL = {
    "mistral-7b": llama(
        32,
        4096,
        14336,
        32,
        8,
        vocab_size=32768,
        max_position_embeddings=32768,
        seq_length=8192,
        rotary_base=1000000.0,
    )
}
