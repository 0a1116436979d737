"""The model: embedding, blocks, final norm, and the head with its loss, written for one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from redline.attention import Attention, MaskSpec
from redline.errors import ShapeError
from redline.formulas.recompute import NOTHING, Recompute
from redline.formulas.shape import ModelShape
from redline.model.block import Block
from redline.model.local import true_columns
from redline.model.modules import Norm, parameter
from redline.model.offload import Offload
from redline.model.ops import Ops, local_ops
from redline.model.random import EMBEDDING, DropoutState, dropout_at
from redline.model.recompute import checkpoint
from redline.model.rope import RopeTable, rope_table
from redline.model.tensor_parallel import TensorParallel


def _ready(part: str) -> None:
    """Parameters that nobody brings are always there."""


class Table(nn.Module):
    """A matrix whose rows stand for tokens or positions: an embedding, or the head."""

    def __init__(self, num_rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(num_rows, size, dtype=dtype)


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has them, then dropout."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        ops: Ops,
        dtype: torch.dtype,
        residual_dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.hidden_dropout, self.residual_dtype = shape.hidden_dropout, residual_dtype
        self.word = Table(shape.padded_vocab_size // tp.size, shape.hidden, dtype)
        learned = shape.position == "learned_absolute"
        self.position = Table(shape.max_positions, shape.hidden, dtype) if learned else None

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, dropout: DropoutState | None) -> Tensor:
        """int64 [B, S] twice -> [S, B, H] in the dtype of the residual stream; [S/tp, B, H] with sequence
        parallelism."""
        learned = (None, None) if self.position is None else (positions_BS.T, self.position.weight)
        x_SBH = self.ops.embedding(tokens_BS.T, self.word.weight, *learned).to(self.residual_dtype)
        site = dropout_at(dropout, EMBEDDING, self.hidden_dropout)
        return x_SBH if site is None else self.ops.dropout(x_SBH, site)


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
        recompute: what training drops in forward and computes again; head and loss are never part of it.
        offload_layers: how many layers, from the first, keep what they save in host memory.
        tp: the ranks that share the model; `ops` are then those of `tensor_parallel_ops`.

    Attributes:
        around_layers: the context that all layers of a forward pass run in.
        before_part: called just before the parameters of "embedding", "layers.3" and last "head" (with the
            final norm) are read; where they are still on their way it waits for them.
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
        recompute: Recompute = NOTHING,
        offload_layers: int = 0,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        assert shape.num_experts == 0 and shape.mtp_num_layers == 0, "the config rules refuse these"
        ops = local_ops() if ops is None else ops
        tp = TensorParallel() if tp is None else tp
        self.shape, self.dtype, self.ops, self.tp = shape, dtype, ops, tp
        self.label_smoothing = label_smoothing
        self.embedding = Embedding(shape, ops=ops, dtype=dtype, residual_dtype=residual_dtype or dtype, tp=tp)
        self.units, self.offload_layers = recompute.units(shape.num_layers), offload_layers
        self.spread = tp.group if recompute.spread else None
        self._copies: torch.cuda.Stream | None = None
        in_units = {index for unit in self.units for index in unit}
        part = shape.of_rank(tp.size)
        self.layers = nn.ModuleList(
            Block(
                part,
                attention=attention,
                ops=ops,
                dtype=dtype,
                recompute=NOTHING if index in in_units else recompute,
            )
            for index in range(shape.num_layers)
        )
        self.final_norm = Norm(shape.hidden, shape=shape, norm=ops.norm, dtype=dtype)
        self.around_layers: Callable[[], AbstractContextManager[None]] = nullcontext
        self.before_part: Callable[[str], None] = _ready
        self.head = None if shape.tied else Table(shape.padded_vocab_size // tp.size, shape.hidden, dtype)

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor, mask: MaskSpec, dropout: DropoutState | None = None
    ) -> Tensor:
        """Tokens to the hidden states that the head reads.

        Args:
            tokens_BS: int64, ids below the true vocabulary size.
            positions_BS: int64, read by learned positions; rotary angles count from the sample's start, or
                from the document's where documents are packed.
            mask: which tokens see which.
            dropout: the keys of this microbatch; None (evaluation) drops nothing.

        Returns: [S, B, H] after the final norm; [S/tp, B, H] with sequence parallelism.
        """
        S = tokens_BS.shape[1]
        packed = mask.cu_seqlens is not None
        longest = mask.max_seqlen if packed else S
        if self.embedding.position is not None and self.shape.max_positions < longest:
            raise ShapeError(
                f"{longest} tokens are more than --max-position-embeddings {self.shape.max_positions}.",
                why="each learned position is a row of a table of that size.",
                mend="shorten the sequence, or give the model more positions.",
            )
        dropout = self.tp.place(dropout, S, self.shape)
        self.before_part("embedding")
        x_SBH = self.embedding(tokens_BS, positions_BS, None if dropout is None else dropout.embedding())
        # With one row, operations disagree about the stride of B, and a compiled block would be made twice.
        x_SBH = x_SBH.flatten(0, 1).unflatten(0, (-1, len(tokens_BS)))
        rope = rope_table(self.shape, S, self.dtype, tokens_BS.device, positions_BS[0] if packed else None)
        run = partial(self._run_layers, rope=rope, mask=mask, dropout=dropout)
        offload = self._offload(rope, tokens_BS.device)
        done = 0
        with self.around_layers():
            for unit in self.units:
                with offload.layer(unit.start):
                    x_SBH = checkpoint(partial(run, unit), x_SBH, spread=self.spread)
                done = unit.stop
            for index in range(done, len(self.layers)):
                with offload.layer(index):
                    x_SBH = run(range(index, index + 1), x_SBH)
        offload.done()
        self.before_part("head")
        hidden_SBH: Tensor = self.final_norm(x_SBH)
        return hidden_SBH

    def _offload(self, rope: RopeTable | None, device: torch.device) -> Offload:
        """What moves the tensors that layers save to host memory, if they are to go there."""
        if not self.offload_layers or not torch.is_grad_enabled():
            return Offload(0, (), None)
        if self._copies is None and device.type == "cuda":
            self._copies = torch.cuda.Stream(device)
        shared = () if rope is None else (rope.cos_SP, rope.sin_SP)
        return Offload(self.offload_layers, (*self.parameters(), *shared), self._copies)

    def _run_layers(
        self,
        indices: range,
        x_SBH: Tensor,
        *,
        rope: RopeTable | None,
        mask: MaskSpec,
        dropout: DropoutState | None,
    ) -> Tensor:
        """These layers one after the other."""
        for index in indices:
            self.before_part(f"layers.{index}")
            x_SBH = self.layers[index](x_SBH, rope, mask, None if dropout is None else dropout.layer(index))
        return x_SBH

    @property
    def head_weight(self) -> Tensor:
        """[padded V/tp, H]: the head's own matrix, or the word embedding it is tied to."""
        table = self.embedding.word if self.head is None else self.head
        return table.weight

    def logits(self, hidden_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, V] over the true vocabulary, on every rank; under tensor parallelism without
        a gradient."""
        logits_SBV = self.tp.all_columns(self.ops.linear(hidden_SBH, self.head_weight))
        return true_columns(logits_SBV, self.shape.vocab_size)

    def loss(
        self,
        hidden_SBH: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        *,
        z_loss: float = 0.0,
        z_total: Tensor | None = None,
    ) -> Tensor:
        """The sum over tokens of weight x (cross-entropy + z-loss), a scalar in fp32 (fp64 for fp64).

        A token whose weight is 0 or whose label is negative contributes exactly nothing, to the loss and to
        every gradient, whatever its hidden state holds: it is cut off before the head, for 0 x NaN would
        still be NaN. The caller divides by the token count (and multiplies by a loss scale) through the
        weights, and calls backward on this very scalar: a fused head makes its gradients in forward.

        Shapes: [S, B, H] ([S/tp, B, H] with sequence parallelism), int64 [B, S], float [B, S] -> [].
        Args:
            z_loss: weight of the squared log-partition (PaLM, arXiv 2204.02311, section 5).
            z_total: [] to which its part of the sum is added, for the record.
        """
        ignored_SB = ((labels_BS < 0) | (weights_BS == 0)).T
        return self.ops.head_loss(
            hidden_SBH.masked_fill(self.tp.own_rows(ignored_SB)[..., None], 0.0).flatten(0, 1),
            self.head_weight,
            labels_BS.T.masked_fill(ignored_SB, 0).flatten(),
            weights_BS.T.masked_fill(ignored_SB, 0.0).flatten(),
            vocab_size=self.shape.vocab_size,
            label_smoothing=self.label_smoothing,
            z_loss=z_loss,
            z_total=z_total,
        )
