"""Samples that hold several documents kept apart, and how they become one row of model input.

Two ways lead here. `--packing` fills samples with whole documents (packing.py); `--dataloader-inter-document-
masking` cuts the joined stream as ever (samples.py) and only marks where documents meet. Both give rows
[3, seq_length] - inputs, labels, positions - in which a document starts where a position is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redline.data.indexed import concat_ranges
from redline.data.microbatch import Documents, Microbatch
from redline.data.packing import PackedOrder
from redline.data.samples import DocumentSamples, TokenStore, check_tokens

INPUT, LABEL, POSITION = range(3)
NOTHING = -2  # the input of a place that pads a sample, and a label that no loss counts: no token is below -1


class PackedSamples:
    """Samples filled with whole documents; the arguments are those of `DocumentSamples`."""

    def __init__(
        self, store: TokenStore, order: PackedOrder, seq_length: int, vocab_size: int, pad_id: int = -1
    ) -> None:
        self.store, self.order = store, order
        self.seq_length, self.vocab_size, self.pad_id = seq_length, vocab_size, pad_id
        self.row_shape: tuple[int, ...] = (3, seq_length)
        self.max_documents = order.max_documents

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples `numbers`: int64 [B] -> int64 [B, 3, seq_length].

        Raises: DataError for a token outside the vocabulary.
        """
        order = self.order
        pieces, counts = order.pieces(numbers)
        documents = np.asarray(order.document[pieces])
        lengths = order.length[pieces].astype(np.int64)
        tokens = self.store.gather(documents, order.offset[pieces].astype(np.int64), lengths + 1)
        check_tokens(self.store, tokens, documents, lengths + 1, self.vocab_size, self.pad_id)
        place = concat_ranges(np.zeros(len(lengths), np.int64), lengths + 1)  # of each token in its piece
        used = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        everywhere = np.arange(self.seq_length)
        taken = everywhere < used[:, None]
        rows = np.full((len(numbers), *self.row_shape), NOTHING, np.int64)
        rows[:, INPUT][taken] = tokens[place < np.repeat(lengths, lengths + 1)]
        rows[:, LABEL][taken] = tokens[place > 0]
        rows[:, POSITION] = everywhere - used[:, None]
        rows[:, POSITION][taken] = concat_ranges(np.zeros(len(lengths), np.int64), lengths)
        return rows


class BoundedSamples:
    """The samples of `DocumentSamples` with documents kept apart; a label beyond a border is dropped."""

    def __init__(self, samples: DocumentSamples) -> None:
        self.samples, self.seq_length = samples, samples.seq_length
        self.row_shape: tuple[int, ...] = (3, samples.seq_length)
        positions = samples.order.sample_index[:, 0]
        self.max_documents = int(np.diff(positions).max(initial=0)) + 1

    def __len__(self) -> int:
        return len(self.samples)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples `numbers`: int64 [B] -> int64 [B, 3, seq_length]."""
        text = self.samples.rows(numbers)
        *_, lengths = self.samples.pieces(numbers)
        place = concat_ranges(np.zeros(len(lengths), np.int64), lengths).reshape(text.shape)
        labels = np.where(place[:, 1:] == 0, NOTHING, text[:, 1:])
        return np.stack([text[:, :-1], labels, place[:, :-1]], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How packed rows become a `Microbatch` of one row, documents told by their starts.

    Attributes:
        max_documents: segments of one sample at most; it fixes the size of the array of starts.
        eod_id, pad_id, eod_mask_loss: as in `BatchFormat`.
    """

    max_documents: int
    eod_id: int | None = None
    pad_id: int = -1
    eod_mask_loss: bool = False

    def microbatch(self, rows: NDArray[np.int64], sample_index: NDArray[np.int64]) -> Microbatch:
        """Samples side by side in one row of B * seq_length places.

        The dropout masks are those of one long sample, the first of the microbatch.

        Shapes: rows int64 [B, 3, S], sample_index int64 [B].
        """
        import torch

        B, _, S = rows.shape
        tokens, labels, positions = (rows[:, part].reshape(1, -1).copy() for part in range(3))
        counts = (labels != NOTHING) & (labels != self.pad_id)
        if self.eod_mask_loss:
            counts &= tokens != self.eod_id
        real = tokens[0] != NOTHING
        tokens[(tokens == NOTHING) | (tokens == self.pad_id)] = 0
        labels[~counts] = 0
        starts = np.flatnonzero(positions[0] == 0)
        lengths = np.diff(starts, append=B * S)[real[starts]]
        bounds = np.full(B * self.max_documents + 1, B * S, np.int32)
        bounds[: len(starts)] = starts
        return Microbatch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            torch.from_numpy(counts.astype(np.float32)),
            torch.from_numpy(positions),
            None,
            torch.from_numpy(sample_index[:1].copy()),
            Documents(
                cu_seqlens=torch.from_numpy(bounds),
                max_seqlen=S,
                num_samples=B,
                num_tokens=int(real.sum()),
                lengths=tuple(lengths.tolist()),
            ),
        )


def token_efficiency(samples: PackedSamples) -> float:
    """The share of places that hold a token."""
    order = samples.order
    tokens = int(order.length.sum(dtype=np.int64))
    return tokens / int(order.shuffle.shape[1] * samples.seq_length)
