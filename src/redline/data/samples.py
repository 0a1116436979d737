"""Samples as rows of tokens, by number: from one token store, or mixed from several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from redline.data.indexed import concat_ranges
from redline.data.sampling import SampleOrder
from redline.errors import DataError

MOCK_SEED, MOCK_DOCUMENTS, MOCK_MAX_LENGTH = 0, 100_000, 4096


class TokenStore(Protocol):
    """Sequences of tokens with random access: `IndexedDataset` or `MockStore`."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, int32 [sequences]."""
        ...

    def gather(self, numbers: NDArray[Any], offsets: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
        """Pieces of several sequences, joined."""
        ...

    def describe(self, number: int) -> str:
        """A sequence, as an error message names it."""
        ...


class MockStore:
    """`--mock-data`: Megatron-LM's synthetic corpus, without a file.

    100,000 documents of 1 to 4095 tokens (seed 0): the ramp 1, 2, 3, ... modulo the vocabulary, ended by the
    end-of-document token. Shuffling and cutting are those of real data, under the run's own seed.
    """

    def __init__(self, vocab_size: int, eod_id: int) -> None:
        self.vocab_size, self.eod_id = vocab_size, eod_id
        generator = np.random.default_rng(MOCK_SEED)
        self.lengths: NDArray[np.int32] = generator.integers(
            1, MOCK_MAX_LENGTH, MOCK_DOCUMENTS, dtype=np.int32
        )

    def gather(self, numbers: NDArray[Any], offsets: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
        """Pieces of several documents, joined; int64."""
        places = concat_ranges(offsets, lengths)
        last = np.repeat(self.lengths[numbers] - 1, lengths)
        return np.where(places == last, self.eod_id, (places + 1) % self.vocab_size)

    def describe(self, number: int) -> str:
        """A document, as an error message names it."""
        return f"--mock-data, document {number}"


class Samples(Protocol):
    """A fixed number of samples.

    Attributes:
        row_shape: of one: (seq_length + 1,), or (3, seq_length) where documents are kept apart (packed.py).
        max_documents: the most documents in one that are kept apart; 0: none are.
    """

    row_shape: tuple[int, ...]
    max_documents: int

    def __len__(self) -> int: ...

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples `numbers`: int64 [B] -> int64 [B, *row_shape]."""
        ...


class DocumentSamples:
    """Samples cut from the shuffled documents of one store.

    Args:
        store: the tokens.
        order: which token starts which sample.
        seq_length: tokens of a sample, without the one more that is its last label.
        vocab_size: ids from here on are refused.
        pad_id: the one id outside the vocabulary that is let through.
    """

    def __init__(
        self, store: TokenStore, order: SampleOrder, seq_length: int, vocab_size: int, pad_id: int = -1
    ) -> None:
        self.store, self.order = store, order
        self.seq_length, self.vocab_size, self.pad_id = seq_length, vocab_size, pad_id
        self.row_shape: tuple[int, ...] = (seq_length + 1,)
        self.max_documents = 0

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples `numbers`: int64 [B] -> int64 [B, seq_length + 1].

        Raises: DataError, naming file, document and id, for a token outside the vocabulary.
        """
        documents, offsets, lengths = self.pieces(numbers)
        tokens = self.store.gather(documents, offsets, lengths)
        check_tokens(self.store, tokens, documents, lengths, self.vocab_size, self.pad_id)
        return tokens.astype(np.int64).reshape(len(numbers), self.seq_length + 1)

    def pieces(self, numbers: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """What samples `numbers` are made of, joined: (documents, first tokens, lengths)."""
        cut = self.order.shuffle_index[numbers].astype(np.int64)
        begin = self.order.sample_index[cut].astype(np.int64)  # [B, 2]: position, offset
        end = self.order.sample_index[cut + 1].astype(np.int64)
        spans = end[:, 0] - begin[:, 0] + 1  # documents each sample touches
        positions = concat_ranges(begin[:, 0], spans)  # [P], P pieces in all
        documents = np.asarray(self.order.document_index[positions])
        last = np.cumsum(spans) - 1
        first = last - spans + 1
        offsets = np.zeros(len(positions), np.int64)
        offsets[first] = begin[:, 1]
        stops = self.store.lengths[documents].astype(np.int64)
        stops[last] = end[:, 1] + 1  # the token shared with the next sample is this one's last label
        return documents, offsets, stops - offsets


def check_tokens(
    store: TokenStore,
    tokens: NDArray[Any],
    documents: NDArray[Any],
    lengths: NDArray[Any],
    vocab_size: int,
    pad_id: int,
) -> None:
    """Raises DataError, naming file, document and id, for a token outside the vocabulary.

    Args:
        tokens: pieces of `lengths` tokens of `documents`, joined.
    """
    if not tokens.size or (tokens.max() < vocab_size and tokens.min() >= 0):
        return
    outside = ((tokens >= vocab_size) | (tokens < 0)) & (tokens != pad_id)
    if not outside.any():
        return
    place = int(outside.argmax())
    document = int(documents[np.searchsorted(np.cumsum(lengths), place, side="right")])
    raise DataError(
        f"{store.describe(document)}: token id {tokens[place]} is outside the vocabulary.",
        why=f"the model has {vocab_size} entries, so ids run from 0 to {vocab_size - 1}.",
        mend="train with the tokenizer (or --vocab-size) that the data was prepared with.",
    )


class BlendedSamples:
    """Samples drawn from several `Samples` in a fixed order (blend.blend_order)."""

    def __init__(
        self, parts: Sequence[Samples], dataset: NDArray[np.int16], sample: NDArray[np.int64]
    ) -> None:
        self.parts, self.dataset, self.sample = parts, dataset, sample
        self.row_shape = parts[0].row_shape
        self.max_documents = max(part.max_documents for part in parts)

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples `numbers`: int64 [B] -> int64 [B, *row_shape]."""
        rows = np.empty((len(numbers), *self.row_shape), np.int64)
        dataset, sample = self.dataset[numbers], np.asarray(self.sample[numbers])
        for part in np.unique(dataset).tolist():
            mine = np.flatnonzero(dataset == part)
            rows[mine] = self.parts[part].rows(sample[mine])
        return rows
