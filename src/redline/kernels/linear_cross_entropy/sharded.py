"""Projection and loss in chunks where each rank holds some rows of the head: op.py's walk, with collectives.

Of each chunk the kernels of cross_entropy/ give statistics of the local columns, the ranks combine them (one
MAX, one SUM), and the local logits are overwritten by their gradient. The gradient of the hidden states is
this rank's part of a sum; who split the head adds it up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import unit_stride
from redline.kernels.cross_entropy.op import VocabShard, combine_shards
from redline.kernels.linear_cross_entropy.accumulate import accumulate
from redline.kernels.linear_cross_entropy.products import HeadProducts, MatrixProducts
from redline.kernels.loss_spec import LossSpec


def launch_sharded(
    hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, dweight_VH: Tensor | None,
    grad_scale: Tensor | None, lse_T: Tensor | None, spec: LossSpec, shard: VocabShard, chunk_tokens: int,
    needs_hidden: bool, fresh: bool, products: HeadProducts | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the launcher of whole.py: (loss_T fp32, gradient of hidden, empty where not needed).

    Shapes: hidden [T, H], whole on every rank; weight [shard.size, H].
    """
    from redline.kernels.cross_entropy.kernel import gradient_, statistics

    hidden, labels = unit_stride(hidden), labels.contiguous()
    weights = None if weights is None else weights.contiguous()
    loss_T = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    dhidden_TH = torch.empty_like(hidden) if needs_hidden else hidden.new_empty(0)
    scale = torch.ones(1, device=hidden.device) if grad_scale is None else grad_scale.view(1)
    if fresh and dweight_VH is not None and not len(hidden):
        dweight_VH.zero_()  # no chunk writes it
    buffer_CV = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))
    products = products or MatrixProducts(weight)
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, len(hidden)))
        hidden_CH, logits_CV = hidden[chunk], buffer_CV[: chunk.stop - start]
        products.logits(hidden_CH, logits_CV)
        tokens: tuple[Tensor, Tensor | None] = labels[chunk], None if weights is None else weights[chunk]
        stats_4C: Tensor = statistics(
            logits_CV, *tokens, shard.start, spec.vocab_size, spec.label_smoothing, spec.z_loss
        )
        loss_T[chunk], lse_C = combine_shards(stats_4C, *tokens, spec, shard.all_reduce)
        if lse_T is not None:
            lse_T[chunk] = lse_C
        if needs_hidden or dweight_VH is not None:
            gradient_(logits_CV, *tokens, lse_C, scale.expand(len(lse_C)), shard.start, *spec.as_args)
        if needs_hidden:
            products.dhidden(logits_CV, dhidden_TH[chunk])
        if dweight_VH is not None:
            accumulate(dweight_VH, logits_CV, hidden_CH, first=fresh and start == 0)
    return loss_T, dhidden_TH
