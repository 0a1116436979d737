"""What the loss without logits asks of whoever multiplies with the head's weight in its place."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HeadProducts(Protocol):
    """The two products with the head's weight, over the first columns of it that the logits have."""

    def logits(self, hidden_CH: Tensor, logits_CV: Tensor) -> None:
        """logits = hidden W^T, into the given tensor."""

    def dhidden(self, dlogits_CV: Tensor, dhidden_CH: Tensor) -> None:
        """dhidden = dlogits W, into the given tensor."""
