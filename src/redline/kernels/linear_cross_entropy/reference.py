"""Projection and loss in plain PyTorch, with the whole logits: what the chunked operator must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype
from redline.kernels.loss_spec import LossSpec, add_z_part


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
    active_T = labels_T >= 0 if weights_T is None else (labels_T >= 0) & (weights_T != 0)
    label_T = torch.where(active_T, labels_T, 0)
    known_T = label_T < spec.vocab_size
    logits_TV = hidden_TH @ weight_VH[: spec.vocab_size].t()
    x_TV = torch.where(active_T[:, None], logits_TV.to(compute_dtype(logits_TV)), 0.0)
    lse_T = x_TV.logsumexp(1)
    add_z_part(z_total, torch.where(active_T, lse_T.detach(), 0.0), weights_T, spec.z_loss)
    label_logit_T = x_TV.gather(1, torch.where(known_T, label_T, 0)[:, None])[:, 0]
    loss_T = lse_T + spec.z_loss * lse_T.square() - spec.label_share * label_logit_T
    if spec.other_share:
        loss_T = loss_T - spec.other_share * x_TV.sum(1)
    loss_T = torch.where(known_T, loss_T, torch.nan)
    if weights_T is not None:
        loss_T = loss_T * weights_T
    return torch.where(active_T, loss_T, 0.0).sum()
