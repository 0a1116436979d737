"""Projection and loss in chunks where the head is whole on this rank: op.py says what is walked, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.formulas.loss_chunks import logit_columns
from redline.kernels.common import unit_stride
from redline.kernels.linear_cross_entropy.accumulate import accumulate
from redline.kernels.linear_cross_entropy.kernel import loss_and_gradient
from redline.kernels.linear_cross_entropy.products import HeadProducts, MatrixProducts
from redline.kernels.loss_spec import loss_spec


def launch(
    hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, dweight_VH: Tensor | None,
    grad_scale: Tensor | None, lse_T: Tensor | None, vocab_size: int, smoothing: float, z_loss: float,
    chunk_tokens: int, needs_hidden: bool, fresh: bool, products: HeadProducts | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss_T fp32, gradient of hidden, empty where not needed).

    The gradient of the weight is added to dweight_VH (written to it, where that is `fresh`), the log-sum-exp
    of the tokens written to lse_T, where they are given.
    """
    hidden = unit_stride(hidden)
    tokens = hidden.shape[0]
    loss_T = hidden.new_empty(tokens, dtype=torch.float32)
    dhidden_TH = torch.empty_like(hidden) if needs_hidden else hidden.new_empty(0)
    if fresh and dweight_VH is not None:  # what no chunk writes
        dweight_VH[logit_columns(vocab_size) if tokens else 0 :].zero_()
    if tokens:
        width = logit_columns(vocab_size)  # of a row of the buffer
        labels, weights = labels.contiguous(), None if weights is None else weights.contiguous()
        spec = loss_spec(vocab_size, smoothing, z_loss)
        used_VH = _rows(weight, 0, width)
        products = products or MatrixProducts(used_VH)
        buffer_CV = hidden.new_empty(min(chunk_tokens, tokens), width)
        for start in range(0, tokens, chunk_tokens):
            stop = min(start + chunk_tokens, tokens)
            hidden_CH, rows_CV = _rows(hidden, start, stop), _rows(buffer_CV, 0, stop - start)
            logits_CV = rows_CV if len(used_VH) == width else rows_CV[:, : len(used_VH)]
            products.logits(hidden_CH, logits_CV)
            loss_and_gradient(
                rows_CV, _rows(labels, start, stop), None if weights is None else _rows(weights, start, stop),
                grad_scale, _rows(loss_T, start, stop), None if lse_T is None else _rows(lse_T, start, stop),
                spec, needs_hidden or dweight_VH is not None,
            )  # fmt: skip
            if needs_hidden:
                products.dhidden(logits_CV, _rows(dhidden_TH, start, stop))
            if dweight_VH is not None:
                accumulate(_rows(dweight_VH, 0, width), logits_CV, hidden_CH, first=fresh and start == 0)
    return loss_T, dhidden_TH


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """x[start:stop], at no cost where that is all of it: most calls have one chunk, and no row to spare."""
    return x if start == 0 and stop >= x.shape[0] else x[start:stop]
