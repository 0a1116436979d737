"""What the loss without logits asks of whoever multiplies with the head's weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class HeadProducts(Protocol):
    """The two products with the head's weight, over the first columns of it that the logits have."""

    def logits(self, hidden_CH: Tensor, logits_CV: Tensor) -> None:
        """logits = hidden W^T, into the given tensor."""

    def dhidden(self, dlogits_CV: Tensor, dhidden_CH: Tensor) -> None:
        """dhidden = dlogits W, into the given tensor."""


@dataclass(frozen=True, slots=True)
class MatrixProducts:
    """HeadProducts of the weight itself, [V, H] in the dtype of what it multiplies."""

    weight_VH: Tensor

    def logits(self, hidden_CH: Tensor, logits_CV: Tensor) -> None:
        """See HeadProducts."""
        torch.mm(hidden_CH, self.weight_VH.t(), out=logits_CV)

    def dhidden(self, dlogits_CV: Tensor, dhidden_CH: Tensor) -> None:
        """See HeadProducts."""
        torch.mm(dlogits_CV, self.weight_VH, out=dhidden_CH)
