"""From token arrays to what the model is fed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a microbatch that is one row of packed samples.

    Attributes:
        cu_seqlens: int32, where each document begins, then the total, repeated up to a size that is fixed for
            a run; what pads a sample counts as a document.
        max_seqlen: no document is longer.
        num_samples: samples in the row.
        num_tokens: places that are no padding.
        lengths: of the documents, what pads a sample left out.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    num_samples: int
    num_tokens: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The rows one forward pass sees.

    Attributes:
        tokens_BS: int64, model input.
        labels_BS: int64, the token that follows each input.
        loss_mask_BS: fp32, 1 where the loss counts, else 0.
        positions_BS: int64, for the position embedding.
        segment_ids_BS: int32, number of the document inside the sample; attention stays within one segment.
            None when documents may attend across their border.
        sample_index_B: int64, number of the sample in training order (the key of its dropout masks).
        documents: of packed samples, which lie side by side in one row; None: a sample a row.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    loss_mask_BS: Tensor
    positions_BS: Tensor
    segment_ids_BS: Tensor | None
    sample_index_B: Tensor
    documents: Documents | None = None

    @property
    def num_samples(self) -> int:
        """Samples in it."""
        return len(self.tokens_BS) if self.documents is None else self.documents.num_samples

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads; what pads packed samples is none."""
        return self.tokens_BS.numel() if self.documents is None else self.documents.num_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens attention keeps together: of each row, segment, or packed document."""
        if self.documents is not None:
            return self.documents.lengths
        if self.segment_ids_BS is None:
            rows, length = self.tokens_BS.shape
            return (length,) * rows
        runs = (row.unique_consecutive(return_counts=True)[1].tolist() for row in self.segment_ids_BS)
        return tuple(length for row in runs for length in row)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Microbatch:
        """The same rows on another device."""
        move = partial(_move, device=device, non_blocking=non_blocking)
        return Microbatch(
            move(self.tokens_BS),
            move(self.labels_BS),
            move(self.loss_mask_BS),
            move(self.positions_BS),
            None if self.segment_ids_BS is None else move(self.segment_ids_BS),
            move(self.sample_index_B),
            self.documents and replace(self.documents, cu_seqlens=move(self.documents.cu_seqlens)),
        )


def _move(tensor: Tensor, device: torch.device | str, non_blocking: bool) -> Tensor:
    return tensor.to(device, non_blocking=non_blocking)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFormat:
    """How token rows become a `Microbatch`: Megatron-LM's rules for end-of-document tokens and padding.

    Attributes:
        eod_id: the end-of-document token; the three switches need it.
        pad_id: marks padding in the data: masked out of the loss, then replaced by token 0.
        reset_position_ids: positions start again at 0 after each end of document.
        reset_attention_mask: attention does not cross the end of a document; the end token belongs to the
            document that it ends.
        eod_mask_loss: no loss where the input is the end-of-document token.
    """

    eod_id: int | None = None
    pad_id: int = -1
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def microbatch(self, text: NDArray[np.int64], sample_index: NDArray[np.int64]) -> Microbatch:
        """Split rows of seq_length + 1 tokens into input and labels.

        Shapes: text int64 [B, S + 1], sample_index int64 [B].
        """
        import torch

        tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
        is_eod = tokens == self.eod_id if self.eod_id is not None else np.zeros_like(tokens, bool)
        counts = labels != self.pad_id
        if self.eod_mask_loss:
            counts &= ~is_eod
        tokens[tokens == self.pad_id] = 0
        labels[labels == self.pad_id] = 0
        segments = document_numbers(is_eod) if self.reset_attention_mask else None
        if self.reset_position_ids:
            positions = positions_in_document(is_eod)
        else:
            positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
        return Microbatch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            torch.from_numpy(counts.astype(np.float32)),
            torch.from_numpy(positions),
            None if segments is None else torch.from_numpy(segments),
            torch.from_numpy(sample_index),
        )


def document_numbers(is_eod: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Ends of document strictly before each token: bool [B, S] -> int32 [B, S]."""
    return np.cumsum(is_eod, axis=1, dtype=np.int32) - is_eod


def positions_in_document(is_eod: NDArray[np.bool_]) -> NDArray[Any]:
    """Distance of each token from the first of its document: bool [B, S] -> int64 [B, S]."""
    places = np.broadcast_to(np.arange(is_eod.shape[1], dtype=np.int64), is_eod.shape)
    starts = np.zeros(is_eod.shape, np.int64)
    starts[:, 1:] = np.where(is_eod[:, :-1], places[:, 1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
