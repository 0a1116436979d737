"""The baseline every trained model must beat: token frequencies alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unigram_loss(
    train_tokens: NDArray[Any], valid_tokens: NDArray[Any], vocab_size: int, *, smoothing: float = 1.0
) -> float:
    """Mean cross-entropy, in nats a token, of a unigram model on `valid_tokens`.

    The model gives token t the probability (count of t in train_tokens + smoothing) / (their sum).

    Args:
        train_tokens, valid_tokens: ids below vocab_size, any shape and integer dtype.
        smoothing: added to each count; above 0, so that an unseen token has a finite loss.
    """
    assert smoothing > 0 and np.size(valid_tokens)
    counts = np.bincount(np.ravel(train_tokens), minlength=vocab_size) + smoothing
    seen = np.bincount(np.ravel(valid_tokens), minlength=vocab_size)
    # sum over t of seen[t] * -log(counts[t] / total), without materialising a loss a token
    return float(np.log(counts.sum()) - (seen * np.log(counts)).sum() / seen.sum())
