"""How fast sample indices are built: 100 million tokens of short documents on one core."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from redline.data.blend import blend_order
from redline.data.sampling import build_sample_order


def data_index_case(
    *, num_tokens: int = 100_000_000, mean_length: int = 100, seq_length: int = 1024, seed: int = 1234
) -> dict[str, Any]:
    """Build the indices of one epoch and of three, and a blend of as many samples.

    Args:
        num_tokens: tokens of the corpus, in documents of 1 to 2 * mean_length - 1 tokens.
        seq_length: tokens of a sample.
    Returns: sizes, and for each of the three the seconds and tokens (for the blend: samples) a second.
    """
    num_documents = num_tokens // mean_length
    lengths = np.random.default_rng(seed).integers(1, 2 * mean_length, num_documents, dtype=np.int32)
    corpus_tokens = int(lengths.sum(dtype=np.int64))
    result: dict[str, Any] = {
        "num_tokens": corpus_tokens,
        "num_documents": num_documents,
        "seq_length": seq_length,
    }
    for name, epochs in (("one_epoch", 1), ("three_epochs", 3)):
        wanted = (epochs * corpus_tokens - 1) // seq_length
        start = time.perf_counter()
        order = build_sample_order(
            lengths, range(num_documents), seq_length=seq_length, num_samples=wanted, seed=seed
        )
        seconds = time.perf_counter() - start
        assert order.num_epochs == epochs
        result[name] = {
            "samples": len(order),
            "seconds": seconds,
            "tokens_per_s": epochs * corpus_tokens / seconds,
        }
    num_samples = num_tokens // 100
    start = time.perf_counter()
    blend_order([0.5, 0.3, 0.15, 0.05], num_samples)
    seconds = time.perf_counter() - start
    result["blend"] = {"samples": num_samples, "seconds": seconds, "samples_per_s": num_samples / seconds}
    return result
