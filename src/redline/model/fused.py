"""The operations of local.py by Redline's fused kernels: same arguments, same results up to rounding.

Here the model's words meet the kernel rooms' (a parameter and its `main_grad`, a dropout site and its key).
An operation that is listed as fused runs its kernel or raises: what may run where is decided before the
model is built, and stands in the run's record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from redline.formulas.operators import WITHOUT_LOGITS, Operator
from redline.formulas.shape import GATED, Activation, Normalization
from redline.kernels import bias_dropout_add as bias_dropout_add_room
from redline.kernels import embedding as embedding_room
from redline.kernels import qk_norm as qk_norm_room
from redline.kernels.bias_geglu import bias_geglu
from redline.kernels.bias_gelu import bias_gelu
from redline.kernels.bias_squared_relu import bias_squared_relu
from redline.kernels.bias_swiglu import bias_swiglu
from redline.kernels.cross_entropy import VocabShard, cross_entropy
from redline.kernels.layer_norm import layer_norm
from redline.kernels.linear_cross_entropy import HeadProducts, LossSpec, linear_cross_entropy
from redline.kernels.rms_norm import add_rms_norm, rms_norm
from redline.kernels.rotary import rotary, rotary_qkv
from redline.model.heads import Heads
from redline.model.local import Affine
from redline.model.main_grad import main_grad_of
from redline.model.ops import Ops, Three, local_ops
from redline.model.random import Dropout
from redline.model.rope import RopeTable


def embedding(
    tokens: Tensor,
    weight_VH: Tensor,
    positions: Tensor | None,
    position_weight_PH: Tensor | None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """One gather; the gradients are summed in sorted order straight into main_grad."""
    learned = None
    if positions is not None and position_weight_PH is not None:
        learned = embedding_room.Positions(positions, position_weight_PH, main_grad_of(position_weight_PH))
    return embedding_room.embedding(
        tokens,
        weight_VH,
        main_grad=main_grad_of(weight_VH),
        positions=learned,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        impl="triton",
    )


def norm(
    x: Tensor,
    weight_C: Tensor,
    bias_C: Tensor | None,
    *,
    kind: Normalization,
    epsilon: float,
    zero_centered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Keeps its input and a number or two a row, no wide copy."""
    main_grad = main_grad_of(weight_C)
    if kind == "RMSNorm":
        return rms_norm(
            x,
            weight_C,
            epsilon,
            zero_centered=zero_centered,
            main_grad=main_grad,
            out_dtype=dtype,
            impl="triton",
        )
    return layer_norm(
        x,
        weight_C,
        bias_C,
        epsilon,
        zero_centered=zero_centered,
        main_grad=main_grad,
        bias_main_grad=main_grad_of(bias_C),
        out_dtype=dtype,
        impl="triton",
    )


def residual_norm(
    y: Tensor | None,
    x: Tensor,
    weight_C: Tensor,
    bias_C: Tensor | None,
    *,
    kind: Normalization,
    epsilon: float,
    zero_centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of h = x + y (x without y), and h: its backward adds the gradient of h's other reader."""
    assert kind == "RMSNorm" and bias_C is None, "the plan refuses others"
    return add_rms_norm(
        y,
        x,
        weight_C,
        epsilon,
        zero_centered=zero_centered,
        main_grad=main_grad_of(weight_C),
        out_dtype=dtype,
        impl="triton",
    )


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
) -> Three:
    """q and k in one pass over the merged projection; backward makes its one gradient."""
    params = qk_norm_room.QKNormParams(
        q_weight=q.weight,
        k_weight=k.weight,
        q_bias=q.bias,
        k_bias=k.bias,
        q_weight_main_grad=main_grad_of(q.weight),
        k_weight_main_grad=main_grad_of(k.weight),
        q_bias_main_grad=main_grad_of(q.bias),
        k_bias_main_grad=main_grad_of(k.bias),
    )
    return qk_norm_room.qk_norm(
        qkv_SBX,
        params,
        num_heads=heads.num_heads,
        num_groups=heads.num_groups,
        head_dim=heads.head_dim,
        kind="l2" if q.weight is None else "rms" if kind == "RMSNorm" else "layer",
        eps=epsilon,
        zero_centered=zero_centered,
        impl="triton",
    )


def rope(q_SBND: Tensor, k_SBGD: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
    """Queries and keys turned into new tensors."""
    return rotary(
        q_SBND,
        k_SBGD,
        table.cos_SP,
        table.sin_SP,
        rotary_dim=2 * table.cos_SP.shape[1],
        interleaved=table.interleaved,
        impl="triton",
    )


def rope_qkv(qkv_SBX: Tensor, heads: Heads, table: RopeTable) -> Three:
    """Turned in place inside the merged projection, which nothing else reads."""
    return rotary_qkv(
        qkv_SBX,
        table.cos_SP,
        table.sin_SP,
        num_heads=heads.num_heads,
        num_groups=heads.num_groups,
        head_dim=heads.head_dim,
        rotary_dim=2 * table.cos_SP.shape[1],
        interleaved=table.interleaved,
        impl="triton",
    )


_ACTIVATIONS: Mapping[Activation, Callable[..., Tensor]] = {
    "gelu": partial(bias_gelu, approximate="exact"),
    "gelu-tanh": partial(bias_gelu, approximate="tanh"),
    "geglu": partial(bias_geglu, approximate="tanh"),
    "quick-geglu": partial(bias_geglu, approximate="quick"),
    "squared-relu": bias_squared_relu,
    "swiglu": bias_swiglu,
}


def activation(
    y: Tensor, bias: Tensor | None, *, kind: Activation, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """One kernel each way, which keeps its input only."""
    gate = {"clamp": clamp, "offset": offset} if kind in GATED else {}
    return _ACTIVATIONS[kind](y, bias, main_grad=main_grad_of(bias), impl="triton", **gate)


def bias_dropout_add(
    y_SBH: Tensor, bias_H: Tensor | None, residual_SBH: Tensor, dropout: Dropout | None
) -> Tensor:
    """The mask of local.bias_dropout_add, bit for bit; it is drawn again in backward, never kept."""
    probability, key = 0.0, None
    if dropout is not None:
        state, probability = dropout.state, dropout.probability
        key = bias_dropout_add_room.DropoutKey(
            dropout.key, state.iteration, state.sample_index_B, state.positions_S
        )
    return bias_dropout_add_room.bias_dropout_add(
        y_SBH, bias_H, residual_SBH, probability, key, main_grad=main_grad_of(bias_H), impl="triton"
    )


def dropout(x_SBH: Tensor, site: Dropout) -> Tensor:
    """Dropout by the same kernel, on a residual of zeros."""
    return bias_dropout_add(x_SBH, None, torch.zeros_like(x_SBH), site)


def loss_with_logits(
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
    """Logits in memory, padded columns left out by the kernel; backward overwrites them by their gradient."""
    spec = LossSpec(vocab_size, label_smoothing, z_loss)
    logits_TV = linear(hidden_TH, weight_VH)
    loss_T = cross_entropy(
        logits_TV, labels_T, spec, weights_T, shard=shard, inplace_grad=True, z_total=z_total, impl="triton"
    )
    return loss_T.sum()


def loss_without_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    weights_T: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float,
    z_loss: float,
    z_total: Tensor | None,
    fuse_wgrad: bool,
    shard: VocabShard | None = None,
    products: HeadProducts | None = None,
) -> Tensor:
    """Head and loss in chunks of tokens. The gradients are made in forward, where the weights are known.

    With `fuse_wgrad` that of the head goes into main_grad at once, so backward must bring 1 (it checks).
    """
    main_grad = main_grad_of(weight_VH) if fuse_wgrad else None
    spec = LossSpec(vocab_size, label_smoothing, z_loss)
    return linear_cross_entropy(
        hidden_TH,
        weight_VH,
        labels_T,
        spec,
        weights_T,
        main_grad=main_grad,
        shard=shard,
        products=products,
        z_total=z_total,
        impl="triton",
    )


def fused_ops(operators: Collection[Operator] = WITHOUT_LOGITS, *, fuse_wgrad: bool = True) -> Ops:
    """The record with the kernels of `operators`, and plain PyTorch for all others.

    Args:
        operators: names that concern no operation of the record ("adamw" for one) are let pass;
            of the two losses at most one.
        fuse_wgrad: as for `local_ops`.
    """
    assert not {"cross_entropy", "linear_cross_entropy"} <= set(operators)
    plain = local_ops(fuse_wgrad=fuse_wgrad)
    entries: dict[Operator, dict[str, Any]] = {
        "norm": {"norm": norm},
        "residual_norm": {"residual_norm": residual_norm},
        "qk_norm": {"qk_norm": qk_norm},
        "rope": {"rope": rope, "rope_qkv": rope_qkv},
        "activation": {"activation": activation},
        "bias_dropout_add": {"bias_dropout_add": bias_dropout_add, "dropout": dropout},
        "embedding": {"embedding": embedding},
        "cross_entropy": {"head_loss": partial(loss_with_logits, linear=plain.linear)},
        "linear_cross_entropy": {"head_loss": partial(loss_without_logits, fuse_wgrad=fuse_wgrad)},
    }
    chosen = (found for name, found in entries.items() if name in operators)
    return replace(plain, **{field: op for found in chosen for field, op in found.items()})
