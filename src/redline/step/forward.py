"""From a microbatch to its share of the loss: the one place where batch, model and dropout keys meet."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.attention import MaskSpec
from redline.data import Microbatch
from redline.model import DropoutState, Transformer


def microbatch_loss(
    model: Transformer,
    microbatch: Microbatch,
    weight: Tensor,
    dropout: DropoutState | None,
    z_loss: float = 0.0,
    z_total: Tensor | None = None,
) -> Tensor:
    """Sum over the microbatch's tokens of weight x (cross-entropy + z-loss).

    Args:
        microbatch: on the model's device.
        weight: scalar on the device: loss scale / tokens of the whole global batch in training.
        dropout: the keys of this microbatch; None drops nothing.
        z_loss, z_total: see `Transformer.loss`. Evaluation has neither: its loss is the plain cross-entropy.

    Returns: a scalar in fp32 (fp64 under fp64).
    """
    window, documents = model.shape.window, microbatch.documents
    if documents is not None:
        mask = MaskSpec(cu_seqlens=documents.cu_seqlens, max_seqlen=documents.max_seqlen, window=window)
    else:
        mask = MaskSpec(segment_ids_BS=microbatch.segment_ids_BS, window=window)
    hidden_SBH = model(microbatch.tokens_BS, microbatch.positions_BS, mask, dropout)
    weights_BS = microbatch.loss_mask_BS.to(weight.dtype) * weight
    return model.loss(hidden_SBH, microbatch.labels_BS, weights_BS, z_loss=z_loss, z_total=z_total)


def wide_dtype(model: Transformer) -> torch.dtype:
    """The dtype of losses and their weights: fp32, or fp64 in an fp64 run."""
    return torch.promote_types(model.dtype, torch.float32)
