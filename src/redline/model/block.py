"""A transformer block: four GEMM sites and the attention between them.

    x   ->  norm + qkv  ->  q/k norm, rope  ->  attention  ->  proj        -> + bias, dropout, + x  = x'
    x'  ->  norm + fc1  ->                                     act + fc2   -> + bias, dropout, + x' = x''

What a block keeps for backward with the plain operations, in bytes a token. e is the size of the compute
dtype, w = max(e, 4) that of the wide one; q = N D, kv = G D; F1 = 2 F for a gated activation, else F.

    two norms            w H and w (LayerNorm 2 w) each: the wide input (at e = w the residual stream itself)
                         and the row's statistics; RMSNorm on a CPU also its normalised value, w H
    input of qkv, fc1    e H each
    output of qkv        e (q + 2 kv), kept whole because v is a view of it
    q/k norm             w (q + kv) where e < w, and w (N + G); RMSNorm on a CPU also w (q + kv), L2 not
    q/k norm or rope     e (q + kv): the q and k that attention reads
    flash, fused, local  e q + w N: the output, which is also the input of proj, and the log-sum-exp
    unfused              w N S + e q; w N more with attention sinks; e N S more where e < w or with dropout,
                         N S for its mask. For B > 1 the products read copies of q, k and v (G = 1: not of
                         all), e (q + 2 kv), in place of the three lines above; with q/k norm at e = w the
                         output of qkv stays too
    output of fc1        e F1 (after the bias)
    activation           e F for the curve of a gate, 2 e F for that of quick-geglu, else nothing; 2 e F more
                         where its input is limited, e F more where up has an offset alone
    input of fc2         e F
    dropout, twice       H each: the mask

Recompute takes lines away (recompute.py): `layernorm` leaves of norms, qkv and fc1 the input of the norms;
`activation` of the three lines before dropout the output of fc1; `core_attn` nothing that the backend keeps
beside its output; `mlp` of everything behind x' nothing but x'.

With `--fused-residual-rmsnorm` the norms of a block hand on the residual stream beside their result, which
keeps the same: a norm's backward then adds the stream's gradient, and where a branch has neither bias nor
dropout its addition to the stream is part of the next norm of the block.

What does not grow with the number of tokens is left out: wide copies of gains and biases, rotary angles (one
table for all layers), and the S x S mask of the unfused attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redline.attention import Attention, MaskSpec
from redline.formulas.recompute import NOTHING, Recompute
from redline.formulas.shape import ModelShape
from redline.model.heads import Heads
from redline.model.main_grad import read
from redline.model.modules import Activation, Linear, Norm, Site, parameter
from redline.model.ops import Ops
from redline.model.random import ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT, DropoutState, dropout_at
from redline.model.recompute import checkpoint
from redline.model.rope import RopeTable


class SelfAttention(nn.Module):
    """x + dropout(attention(norm(x)) W_proj^T + b), with N query heads over G groups of keys and values.

    Under tensor parallelism `shape` has the heads and ffn features of one rank; with sequence parallelism the
    residual stream is [S/tp, B, H] while attention sees all of S.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: Attention,
        ops: Ops,
        dtype: torch.dtype,
        recompute: Recompute = NOTHING,
    ) -> None:
        super().__init__()
        self.shape, self.ops, self.attention = shape, ops, attention
        self.recompute_core = recompute.drops("core_attn")
        q, kv, D = shape.q_size, shape.kv_size, shape.head_dim
        self.heads = Heads(shape.num_heads, shape.num_groups, D)
        self.norm = _norm(shape, ops, dtype)
        self.adds_later = self.norm.hands_on and not (shape.bias_linear or shape.hidden_dropout)
        self.qkv = Linear(shape.hidden, q + 2 * kv, bias=shape.bias_qkv, linear=ops.linear, dtype=dtype)
        self.proj = Linear(
            q, shape.hidden, bias=shape.bias_linear, linear=ops.row_linear, dtype=dtype, defer_bias=True
        )
        self.sink = parameter(shape.num_heads, dtype=dtype) if shape.softmax_type == "learnable" else None
        self.q_norm = self.k_norm = None
        if shape.qk_norm != "none":
            affine = shape.qk_norm == "norm"
            self.q_norm = Norm(D, shape=shape, norm=ops.norm, dtype=dtype, affine=affine)
            self.k_norm = Norm(D, shape=shape, norm=ops.norm, dtype=dtype, affine=affine)
        self.rebuilds_norm = recompute.drops("layernorm")
        before = None if self.norm.hands_on else self.norm
        self.qkv_site: Callable[[Tensor], Tensor] = Site(before, self.qkv, rebuild=self.rebuilds_norm)
        self.proj_site: Callable[[Tensor], Tensor] = Site(None, self.proj)
        self.softmax_scale = D**-0.5 if shape.softmax_scale is None else shape.softmax_scale

    def forward(
        self, x_SBH: Tensor, rope: RopeTable | None, mask: MaskSpec, dropout: DropoutState | None
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> the residual stream [S, B, H], and what the next norm has yet to add to it."""
        n_SBH, x_SBH = self.norm.split(x_SBH) if self.norm.hands_on else (x_SBH, x_SBH)
        q_SBND, k_SBGD, v_SBGD = self._heads(self.qkv_site(n_SBH), rope)
        core = partial(self._core, mask=mask, dropout=dropout)
        # Asked in this order, here and below, an evaluation does not depend on the choice: one graph for all.
        run = partial(checkpoint, core) if torch.is_grad_enabled() and self.recompute_core else core
        context_SBND = run(q_SBND, k_SBGD, v_SBGD)
        y_SBH = self.proj_site(context_SBND.flatten(2))
        if self.adds_later:
            return x_SBH, y_SBH
        output_dropout = dropout_at(dropout, ATTENTION_OUTPUT, self.shape.hidden_dropout)
        return self.ops.bias_dropout_add(y_SBH, self.proj.bias, x_SBH, output_dropout), None

    def _core(
        self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, *, mask: MaskSpec, dropout: DropoutState | None
    ) -> Tensor:
        """The attention itself, as the backend computes it: [S, B, N, D]."""
        return self.attention(
            q_SBND,
            k_SBGD,
            v_SBGD,
            mask,
            softmax_scale=self.softmax_scale,
            dropout=dropout_at(dropout, ATTENTION, self.shape.attention_dropout),
            softcap=self.shape.softcap,
            sink_N=self._sinks(q_SBND),
        )

    def _sinks(self, q_SBND: Tensor) -> Tensor | None:
        """The score of each head that no key has, in fp32 at least; None for the plain softmax."""
        if self.sink is not None:
            return read(self.sink)
        if self.shape.softmax_type == "vanilla":
            return None
        wide = torch.promote_types(q_SBND.dtype, torch.float32)
        return q_SBND.new_zeros(q_SBND.shape[2], dtype=wide)

    def _heads(self, qkv_SBX: Tensor, rope: RopeTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cut the merged projection into heads, and normalise and rotate queries and keys."""
        if self.q_norm is not None and self.k_norm is not None:
            q_SBND, k_SBGD, v_SBGD = self.ops.qk_norm(
                qkv_SBX, self.heads, self.q_norm.affine, self.k_norm.affine, **self.q_norm.form
            )
            if rope is not None:
                q_SBND, k_SBGD = self.ops.rope(q_SBND, k_SBGD, rope)
            return q_SBND, k_SBGD, v_SBGD
        if rope is not None:
            return self.ops.rope_qkv(qkv_SBX, self.heads, rope)
        return self.heads.split(qkv_SBX)


class MLP(nn.Module):
    """x + dropout(activation(norm(x) W_1^T + b_1) W_2^T + b_2); fc1 is [gate; up] for a gated activation."""

    def __init__(
        self, shape: ModelShape, *, ops: Ops, dtype: torch.dtype, recompute: Recompute = NOTHING
    ) -> None:
        super().__init__()
        self.shape, self.ops = shape, ops
        deferred: dict[str, Any] = {"bias": shape.bias_linear, "dtype": dtype, "defer_bias": True}
        self.norm = _norm(shape, ops, dtype)
        self.fc1 = Linear(shape.hidden, shape.fc1_size, linear=ops.linear, **deferred)
        self.fc2 = Linear(shape.ffn, shape.hidden, linear=ops.row_linear, **deferred)
        self.dropped = recompute.drops("mlp")  # nothing inside is kept, and nothing inside needs rebuilding
        form = {"kind": shape.activation, "clamp": shape.activation_clamp, "offset": shape.glu_offset}
        self.activation = Activation(self.fc1, ops.activation, form)
        self.rebuilds = {
            name: recompute.drops(name) and not self.dropped for name in ("layernorm", "activation")
        }
        self.fc1_site: Callable[[Tensor], Tensor] = Site(
            None if self.norm.hands_on else self.norm, self.fc1, rebuild=self.rebuilds["layernorm"]
        )
        self.fc2_site: Callable[[Tensor], Tensor] = Site(
            self.activation, self.fc2, rebuild=self.rebuilds["activation"]
        )
        self.whole: Callable[[Tensor], Tensor] | None = None  # both sites as one, where it stands for them

    def forward(
        self, x_SBH: Tensor, dropout: DropoutState | None, before_SBH: Tensor | None = None
    ) -> Tensor:
        """[S, B, H] -> [S, B, H], the residual included; `before` is what the norm adds to x first."""
        n_SBH, x_SBH = self.norm.split(x_SBH, before_SBH) if self.norm.hands_on else (x_SBH, x_SBH)
        y_SBH = self.fc2_site(self.fc1_site(n_SBH)) if self.whole is None else self.whole(n_SBH)
        output_dropout = dropout_at(dropout, MLP_OUTPUT, self.shape.hidden_dropout)
        return self.ops.bias_dropout_add(y_SBH, self.fc2.bias, x_SBH, output_dropout)


class Block(nn.Module):
    """Attention, then MLP, each on the normalised residual stream."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: Attention,
        ops: Ops,
        dtype: torch.dtype,
        recompute: Recompute = NOTHING,
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(shape, attention=attention, ops=ops, dtype=dtype, recompute=recompute)
        self.mlp = MLP(shape, ops=ops, dtype=dtype, recompute=recompute)

    def forward(
        self, x_SBH: Tensor, rope: RopeTable | None, mask: MaskSpec, dropout: DropoutState | None
    ) -> Tensor:
        """[S, B, H] -> [S, B, H]; `dropout` is the state narrowed to this layer, None in evaluation."""
        x_SBH, before_SBH = self.attention(x_SBH, rope, mask, dropout)
        mlp = partial(self.mlp, dropout=dropout)
        if torch.is_grad_enabled() and self.mlp.dropped:
            return checkpoint(mlp, x_SBH)
        y_SBH: Tensor = mlp(x_SBH, before_SBH=before_SBH)
        return y_SBH


def _norm(shape: ModelShape, ops: Ops, dtype: torch.dtype) -> Norm:
    """The norm before a branch."""
    return Norm(shape.hidden, shape=shape, norm=ops.norm, residual_norm=ops.residual_norm, dtype=dtype)
