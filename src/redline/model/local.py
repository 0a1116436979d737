"""The operations of a block in plain PyTorch: what every fused kernel must equal.

Each computes in fp32 (fp64 for fp64) where a sum or a bias is involved and rounds once to its input's dtype.
Parameters are read through main_grad.py, so their gradients land where the optimizer looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.formulas.shape import Activation, Normalization
from redline.kernels.activation_reference import Form, activate
from redline.kernels.cross_entropy import LossSpec, VocabShard
from redline.kernels.cross_entropy import cross_entropy as sharded_cross_entropy
from redline.model.heads import Heads
from redline.model.main_grad import embed, read
from redline.model.random import Dropout


class Affine(NamedTuple):
    """The parameters of a norm: the gain and the bias, None where it has none."""

    weight: Tensor | None
    bias: Tensor | None


def embedding(
    tokens: Tensor,
    weight_VH: Tensor,
    positions: Tensor | None,
    position_weight_PH: Tensor | None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Each token's row, plus its position's where positions are learned: int64 [...] -> [..., H].

    Args:
        vocab_start, vocab_size: first id of these rows, and rows on all ranks, where the vocabulary is split;
            an id of another rank gives zeros.
    """
    if vocab_size is None or vocab_size == len(weight_VH):
        x = embed(tokens, weight_VH)
    else:
        own = tokens - vocab_start
        elsewhere = (own < 0) | (own >= len(weight_VH))
        x = embed(own.masked_fill(elsewhere, 0), weight_VH).masked_fill(elsewhere[..., None], 0.0)
    if positions is None or position_weight_PH is None:
        return x
    return x + embed(positions, position_weight_PH)


def norm(
    x: Tensor,
    weight_C: Tensor | None,
    bias_C: Tensor | None,
    *,
    kind: Normalization,
    epsilon: float,
    zero_centered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """LayerNorm, or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), over the last dimension, [..., C].

    Args:
        weight_C: the gain, or the gain minus one when `zero_centered`; None for a gain of one.
        dtype: of the output.
    """
    # The alias gathers the gradients of a norm's several reads of x. Whoever else reads x is then met by one
    # sum, as under recompute, and the bits are the same.
    wide = x.view_as(x).to(torch.promote_types(x.dtype, torch.float32))
    gain_C = None if weight_C is None else read(weight_C)
    if gain_C is not None and zero_centered:
        gain_C = gain_C + 1.0
    size = (x.shape[-1],)
    if kind == "RMSNorm":
        return F.rms_norm(wide, size, gain_C, epsilon).to(dtype)
    return F.layer_norm(wide, size, gain_C, None if bias_C is None else read(bias_C), epsilon).to(dtype)


def qk_norm(
    qkv_SBX: Tensor,
    heads: Heads,
    q: Affine,
    k: Affine,
    *,
    kind: Normalization,
    epsilon: float,
    zero_centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a merged projection into heads, with those of q and k normalised over their channels.

    Shapes: [S, B, (N + 2G) D] -> [S, B, N, D], [S, B, G, D], [S, B, G, D], the last a view.
    """
    q_SBND, k_SBGD, v_SBGD = heads.split(qkv_SBX)
    q_SBND, k_SBGD = (
        norm(x, *affine, kind=kind, epsilon=epsilon, zero_centered=zero_centered, dtype=dtype)
        for x, affine in ((q_SBND, q), (k_SBGD, k))
    )
    return q_SBND, k_SBGD, v_SBGD


# The kernels' words: the curve, and whether its result is multiplied by the other half.
KINDS: dict[Activation, tuple[str, bool]] = {
    "swiglu": ("silu", True),
    "geglu": ("tanh", True),
    "quick-geglu": ("quick", True),
    "gelu": ("exact", False),
    "gelu-tanh": ("tanh", False),
    "squared-relu": ("relu2", False),
}


def activation(
    y: Tensor, bias: Tensor | None, *, kind: Activation, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """The MLP's activation of y + bias: [..., F] -> [..., F]; gated, [..., 2F] as [gate, up] -> [..., F].

    Args:
        clamp: gated, the limit of gate from above and of up on both sides; beyond, the gradient is 0.
        offset: gated, added to up before the gate multiplies it.
    Sources: Shazeer 2020, "GLU variants", arXiv 2002.05202; So et al. 2021, arXiv 2109.08668 (squared ReLU);
        limit and offset: OpenAI 2025, gpt-oss model card, arXiv 2508.10925.
    """
    if bias is not None:
        y = (y + read(bias)).to(y.dtype)
    return activate(y, Form(*KINDS[kind], clamp, offset))


def bias_dropout_add(
    y_SBH: Tensor, bias_H: Tensor | None, residual_SBH: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + dropout(y + bias), in the residual's dtype."""
    if bias_H is not None:
        y_SBH = y_SBH + read(bias_H)
    if dropout is not None:
        y_SBH = dropout.drop_hidden(y_SBH)
    return (residual_SBH + y_SBH).to(residual_SBH.dtype)


def dropout(x_SBH: Tensor, site: Dropout) -> Tensor:
    """Drop elements of [S, B, H] and scale up the others."""
    return site.drop_hidden(x_SBH)


def head_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    weights_T: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float,
    z_loss: float,
    z_total: Tensor | None,
    linear: Callable[..., Tensor],
    shard: VocabShard | None = None,
) -> Tensor:
    """The sum over tokens of weight x (cross-entropy + z-loss), [] in fp32 (fp64 for fp64).

    Args:
        weight_VH: of the head; rows from `vocab_size` on are padding.
        labels_T: int64 below `vocab_size`.
        weights_T: float; not differentiated.
        z_loss: weight of the squared log-partition (PaLM, arXiv 2204.02311, section 5).
        z_total: [] to which the z-loss part of the sum is added, for the record.
        linear: the GEMM.
        shard: which of the head's rows these are, where the vocabulary is split between ranks.
    """
    if shard is not None:
        spec = LossSpec(vocab_size, label_smoothing, z_loss)
        logits_TV = linear(hidden_TH, weight_VH)
        return sharded_cross_entropy(
            logits_TV, labels_T, spec, weights_T, shard=shard, z_total=z_total, impl="reference"
        ).sum()
    logits_TV = true_columns(linear(hidden_TH, weight_VH), vocab_size)
    loss_T = cross_entropy(logits_TV, labels_T, label_smoothing=label_smoothing)
    weights_T = weights_T.to(loss_T.dtype)
    loss = (loss_T * weights_T).sum()
    if z_loss:
        z_part = z_loss * (logits_TV.to(loss_T.dtype).logsumexp(1).square() * weights_T).sum()
        loss = loss + z_part
        if z_total is not None:
            z_total.add_(z_part.detach())
    return loss


def true_columns(logits: Tensor, vocab_size: int) -> Tensor:
    """A view without the logits of padded rows.

    The GEMM computes those too: cut to 50257 rows it takes seven times as long as with 50304 (H200, bf16).
    They enter no softmax, so their gradient is exactly zero.
    """
    return logits[..., :vocab_size] if logits.shape[-1] > vocab_size else logits


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, *, label_smoothing: float) -> Tensor:
    """-log softmax(logits)[label] of each token, fp32 (fp64 for fp64): [T, V], int64 [T] -> [T].

    Args:
        label_smoothing: the share of the target's probability that the V - 1 other tokens get, evenly.
    """
    V = logits_TV.shape[1]
    wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    # PyTorch spreads its share over all V tokens, the target among them.
    spread = label_smoothing * V / (V - 1) if label_smoothing else 0.0
    return F.cross_entropy(wide, labels_T, reduction="none", label_smoothing=spread)
