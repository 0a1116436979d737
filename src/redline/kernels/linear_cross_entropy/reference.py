"""Projection and loss in plain PyTorch, with the whole logits: what the chunked operator must equal."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.cross_entropy.reference import cross_entropy_reference
from redline.kernels.loss_spec import LossSpec


def linear_cross_entropy_reference(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    spec: LossSpec,
    weights_T: Tensor | None = None,
    z_total: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the tokens' losses, 0-d; fp32, or fp64 for fp64 input. Formula: loss_spec.py.

    The z-loss part of it is added to `z_total`, where there is one.
    """
    logits_TV = hidden_TH @ weight_VH[: spec.vocab_size].t()
    return cross_entropy_reference(logits_TV, labels_T, spec, weights_T, z_total).sum()
