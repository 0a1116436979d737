"""The model: embedding, blocks, final norm, and the head with its loss, written for one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from redline.attention import Attention, MaskSpec
from redline.errors import ShapeError
from redline.formulas.shape import ModelShape
from redline.model.block import Block
from redline.model.main_grad import embed
from redline.model.modules import Norm, parameter
from redline.model.ops import Ops, local_ops
from redline.model.random import EMBEDDING, DropoutState, dropout_at
from redline.model.rope import rope_table


class Table(nn.Module):
    """A matrix whose rows stand for tokens or positions: an embedding, or the head."""

    def __init__(self, num_rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(num_rows, size, dtype=dtype)


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has them, then dropout."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_dropout, self.residual_dtype = shape.hidden_dropout, residual_dtype
        self.word = Table(shape.padded_vocab_size, shape.hidden, dtype)
        learned = shape.position == "learned_absolute"
        self.position = Table(shape.max_positions, shape.hidden, dtype) if learned else None

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, dropout: DropoutState | None) -> Tensor:
        """int64 [B, S] twice -> [S, B, H] in the dtype of the residual stream."""
        x_SBH = embed(tokens_BS.T, self.word.weight)
        if self.position is not None:
            x_SBH = x_SBH + embed(positions_BS.T, self.position.weight)
        x_SBH = x_SBH.to(self.residual_dtype)
        site = dropout_at(dropout, EMBEDDING, self.hidden_dropout)
        return x_SBH if site is None else site.drop_hidden(x_SBH)


class Transformer(nn.Module):
    """A dense GPT, Llama or Qwen model.

    Built on the meta device, without memory: the flat buffers, or `to_empty`, give the parameters storage.

    Args:
        shape: the model, every default resolved.
        attention: the backend that `select_backend` chose.
        dtype: of parameters and activations.
        ops: the implementation of everything but attention.
        residual_dtype: of the residual stream (`--fp32-residual-connection`); None: `dtype`.
        label_smoothing: see local.cross_entropy.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: Attention,
        dtype: torch.dtype,
        ops: Ops | None = None,
        residual_dtype: torch.dtype | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        assert shape.num_experts == 0 and shape.mtp_num_layers == 0, "the config rules refuse these"
        ops = local_ops() if ops is None else ops
        self.shape, self.dtype, self.ops, self.label_smoothing = shape, dtype, ops, label_smoothing
        self.embedding = Embedding(shape, dtype, residual_dtype or dtype)
        self.layers = nn.ModuleList(
            Block(shape, attention=attention, ops=ops, dtype=dtype) for _ in range(shape.num_layers)
        )
        self.final_norm = Norm(shape.hidden, shape=shape, norm=ops.norm, dtype=dtype)
        self.head = None if shape.tied else Table(shape.padded_vocab_size, shape.hidden, dtype)

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor, mask: MaskSpec, dropout: DropoutState | None = None
    ) -> Tensor:
        """Tokens to the hidden states that the head reads.

        Args:
            tokens_BS: int64, ids below the true vocabulary size.
            positions_BS: int64, read by learned positions; rotary angles count from the sample's start.
            mask: which tokens see which.
            dropout: the keys of this microbatch; None (evaluation) drops nothing.

        Returns: [S, B, H] after the final norm.
        """
        S = tokens_BS.shape[1]
        if self.embedding.position is not None and self.shape.max_positions < S:
            raise ShapeError(
                f"{S} tokens are more than --max-position-embeddings {self.shape.max_positions}.",
                why="each learned position is a row of a table of that size.",
                mend="shorten the sequence, or give the model more positions.",
            )
        x_SBH = self.embedding(tokens_BS, positions_BS, None if dropout is None else dropout.embedding())
        rope = rope_table(self.shape, S, self.dtype, tokens_BS.device)
        for index, layer in enumerate(self.layers):
            x_SBH = layer(x_SBH, rope, mask, None if dropout is None else dropout.layer(index))
        hidden_SBH: Tensor = self.final_norm(x_SBH)
        return hidden_SBH

    def logits(self, hidden_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, V] over the true vocabulary, a view without the logits of padded rows.

        The GEMM computes those too: cut to 50257 rows it takes seven times as long as with 50304 (H200,
        bf16). They enter no softmax, so their gradient is exactly zero.
        """
        table = self.embedding.word if self.head is None else self.head
        logits_SBV = self.ops.linear(hidden_SBH, table.weight)
        padded = self.shape.padded_vocab_size > self.shape.vocab_size
        return logits_SBV[..., : self.shape.vocab_size] if padded else logits_SBV

    def loss(self, hidden_SBH: Tensor, labels_BS: Tensor, weights_BS: Tensor) -> Tensor:
        """The sum over tokens of weight x cross-entropy, a scalar in fp32 (fp64 for fp64).

        A token whose weight is 0 or whose label is negative contributes exactly nothing, to the loss and to
        every gradient, whatever its hidden state holds: it is cut off before the head, for 0 x NaN would
        still be NaN. The caller divides by the token count (and multiplies by a loss scale) through the
        weights.

        Shapes: [S, B, H], int64 [B, S], float [B, S] -> [].
        """
        ignored_SB = ((labels_BS < 0) | (weights_BS == 0)).T
        hidden_SBH = hidden_SBH.masked_fill(ignored_SB[..., None], 0.0)
        labels_T = labels_BS.T.masked_fill(ignored_SB, 0).flatten()
        logits_TV = self.logits(hidden_SBH).flatten(0, 1)
        loss_T = self.ops.cross_entropy(logits_TV, labels_T, label_smoothing=self.label_smoothing)
        weights_T = weights_BS.T.masked_fill(ignored_SB, 0.0).flatten()
        return (loss_T * weights_T.to(loss_T.dtype)).sum()
