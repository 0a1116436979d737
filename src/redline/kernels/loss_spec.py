"""The token loss that the rooms cross_entropy and linear_cross_entropy compute.

For a token with logits x over the true vocabulary of K entries and label y, with lse = log(sum(exp(x))):

    loss = lse - (1 - s) * x[y] - s / K * sum(x) + z * lse^2          s = smoothing * K / (K - 1)
    d loss / d x[v] = exp(x[v] - lse) * (1 + 2 * z * lse) - s / K - (1 - s) * [v == y]

so that label smoothing gives 1 - smoothing to the label and smoothing / (K - 1) to each other entry. A token
takes no part (loss and gradient exactly 0, whatever its logits hold) when its label is negative or its weight
is 0. A label beyond the vocabulary gives a NaN loss: loud, without a synchronisation.

`kernels/loss_triton.py` holds the device functions for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from redline.errors import ShapeError


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which loss: what does not differ between tokens.

    Attributes:
        vocab_size: entries of the true, global vocabulary; columns from there on are padding.
        label_smoothing: probability taken from the label and spread over the other entries, in [0, 1).
        z_loss: factor of the square of the log-partition (PaLM, arXiv 2204.02311, section 5).
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or (self.label_smoothing and self.vocab_size < 2):
            raise ShapeError(
                f"a vocabulary of {self.vocab_size} entries has no loss.",
                why="the softmax needs an entry, label smoothing a second one.",
            )
        if not self.z_loss >= 0.0:
            raise ShapeError(
                f"a z-loss of weight {self.z_loss} is no loss.",
                why="it would reward a log-partition far from 0.",
            )
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ShapeError(
                f"label smoothing {self.label_smoothing} is not in [0, 1).",
                why="it is the probability taken from the label.",
            )

    @property
    def as_args(self) -> tuple[int, float, float]:
        """The fields in order, as operators take them."""
        return self.vocab_size, self.label_smoothing, self.z_loss

    def columns_of(self, vocab_start: int, num_columns: int) -> int:
        """How many of the columns from `vocab_start` on are no padding."""
        return min(max(self.vocab_size - vocab_start, 0), num_columns)

    @property
    def label_share(self) -> float:
        """1 - s: the factor of the label's own logit."""
        return 1.0 - self.vocab_size * self.other_share

    @property
    def other_share(self) -> float:
        """s / K: the factor of every logit."""
        return self.label_smoothing / max(self.vocab_size - 1, 1)


def takes_part(labels_T: Tensor, weights_T: Tensor | None) -> Tensor:
    """Which tokens have a loss: bool [T]."""
    return labels_T >= 0 if weights_T is None else (labels_T >= 0) & (weights_T != 0)


def add_z_part(total: Tensor | None, lse_T: Tensor, weights_T: Tensor | None, z_loss: float) -> None:
    """Add what the z-loss makes of the tokens' weighted losses to `total`, where somebody wants it.

    Args:
        total: 0-d, added to in place; not differentiated.
        lse_T: log-sum-exp of each token, 0 where it takes no part.
    """
    if total is not None:
        squares_T = lse_T.square() if weights_T is None else lse_T.square() * weights_T
        total.add_(squares_T.sum(), alpha=z_loss)


@functools.cache
def loss_spec(vocab_size: int, label_smoothing: float, z_loss: float) -> LossSpec:
    """The `LossSpec` of operator arguments; a launch is too short to check them anew each time."""
    return LossSpec(vocab_size, label_smoothing, z_loss)
