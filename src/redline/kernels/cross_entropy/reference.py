"""The token loss in plain PyTorch: what the kernels must equal, and what runs without them."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype
from redline.kernels.loss_spec import LossSpec, add_z_part, takes_part


def cross_entropy_reference(
    logits_TV: Tensor,
    labels_T: Tensor,
    spec: LossSpec,
    weights_T: Tensor | None = None,
    z_total: Tensor | None = None,
) -> Tensor:
    """Weighted loss of each token, [T]; fp32, or fp64 for fp64 logits. See loss_spec.py for the formula.

    The z-loss part of them is added to `z_total`, where there is one.
    """
    labels_T = labels_T.long()
    active_T = takes_part(labels_T, weights_T)
    x_TV = logits_TV[:, : spec.vocab_size].to(compute_dtype(logits_TV))  # the padding is cut off
    x_TV = torch.where(active_T[:, None], x_TV, 0.0)  # a NaN of an ignored token stops here, both ways
    label_T = torch.where(active_T, labels_T, 0)
    known_T = label_T < spec.vocab_size
    lse_T = x_TV.logsumexp(1)
    add_z_part(z_total, torch.where(active_T, lse_T.detach(), 0.0), weights_T, spec.z_loss)
    label_logit_T = x_TV.gather(1, torch.where(known_T, label_T, 0)[:, None])[:, 0]
    loss_T = lse_T - spec.label_share * label_logit_T + spec.z_loss * lse_T.square()
    if spec.other_share:
        loss_T = loss_T - spec.other_share * x_TV.sum(1)
    loss_T = torch.where(known_T, loss_T, torch.nan)
    if weights_T is not None:
        loss_T = loss_T * weights_T
    return torch.where(active_T, loss_T, 0.0)


def statistics_reference(
    logits_TV: Tensor, labels_T: Tensor, weights_T: Tensor | None, spec: LossSpec, vocab_start: int
) -> Tensor:
    """[4, T] of one shard: max, sum of exp(x - max), label logit (0 if elsewhere), sum of logits."""
    labels_T = labels_T.long()
    columns = logits_TV.shape[1]
    num_local = spec.columns_of(vocab_start, columns)
    x_TV = logits_TV[:, :num_local].to(compute_dtype(logits_TV))
    if num_local == 0:
        x_TV = x_TV.new_full((len(labels_T), 1), -torch.inf)
    peak_T = x_TV.amax(1)
    total_T = (x_TV - torch.where(peak_T.isneginf(), 0.0, peak_T)[:, None]).exp().sum(1)
    local_T = labels_T - vocab_start
    here_T = (local_T >= 0) & (local_T < num_local)
    label_logit_T = x_TV.gather(1, torch.where(here_T, local_T, 0)[:, None])[:, 0]
    label_logit_T = torch.where(here_T, label_logit_T, 0.0)
    label_logit_T = torch.where(labels_T < spec.vocab_size, label_logit_T, torch.nan)
    sum_T = x_TV.sum(1) if spec.other_share and num_local else torch.zeros_like(peak_T)
    stats_4T = torch.stack((peak_T, total_T, label_logit_T, sum_T))
    active_T = takes_part(labels_T, weights_T)
    return torch.where(active_T, stats_4T, 0.0)


def gradient_reference(
    logits_TV: Tensor, labels_T: Tensor, weights_T: Tensor | None, lse_T: Tensor, upstream_T: Tensor,
    spec: LossSpec, vocab_start: int = 0,
) -> Tensor:  # fmt: skip
    """The gradient of one shard's logits, in their dtype."""
    columns = torch.arange(vocab_start, vocab_start + logits_TV.shape[1], device=logits_TV.device)
    active_T = takes_part(labels_T, weights_T)
    scale_T = upstream_T if weights_T is None else upstream_T * weights_T
    grad_TV = (logits_TV.to(compute_dtype(logits_TV)) - lse_T[:, None]).exp()
    grad_TV = grad_TV * (1.0 + 2.0 * spec.z_loss * lse_T)[:, None] - spec.other_share
    grad_TV = grad_TV - spec.label_share * (columns == labels_T[:, None])
    live_TV = active_T[:, None] & (columns < spec.vocab_size)
    return torch.where(live_TV, grad_TV * scale_T[:, None], 0.0).to(logits_TV.dtype)
