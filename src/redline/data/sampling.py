"""Which tokens make up which training sample: document, sample and shuffle index, as Megatron-LM builds them.

The documents of a split are repeated for as many epochs as the wanted samples need and shuffled (document
index); the joined token stream is cut every `seq_length` tokens (sample index; neighbours share one token,
since a sample has seq_length + 1); the samples are shuffled (shuffle index). When the last epoch is used for
less than 80 % of its samples it is shuffled apart, so that the earlier epochs stay complete.

Everything is a function of (lengths, range, seq_length, samples wanted, seed). Two cumulative sums and one
binary search replace Megatron's loop over documents; the results are the same, as tests against that loop
show. NumPy's legacy RandomState is used because its shuffles are what Megatron's are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

INT32_MAX = np.iinfo(np.int32).max
UINT32_MAX = np.iinfo(np.uint32).max
SEPARATE_BELOW = 0.80


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How often the documents are repeated.

    Attributes:
        num_epochs: repetitions.
        num_samples: samples that can be cut from them.
        before_last: samples shuffled together; less than num_samples when the last epoch is shuffled apart.
    """

    num_epochs: int
    num_samples: int
    before_last: int

    @property
    def separate_last(self) -> bool:
        """True when the last epoch is shuffled apart."""
        return self.before_last < self.num_samples


def plan_epochs(tokens_per_epoch: int, seq_length: int, wanted: int | None) -> EpochPlan:
    """The least number of epochs that gives `wanted` samples (None: one epoch)."""
    assert tokens_per_epoch > 0, "an empty split has no epochs"
    tokens_wanted = 0 if wanted is None else wanted * seq_length + 1
    num_epochs = max(1, -(-tokens_wanted // tokens_per_epoch))
    num_samples = (num_epochs * tokens_per_epoch - 1) // seq_length
    if num_epochs == 1 or wanted is None:
        return EpochPlan(num_epochs, num_samples, num_samples)
    sans_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = wanted - sans_last < int(SEPARATE_BELOW * samples_per_epoch)
    return EpochPlan(num_epochs, num_samples, sans_last if separate else num_samples)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The three indices.

    Attributes:
        document_index: int32 [epochs * documents], sequence numbers in the order they are joined.
        sample_index: [samples + 1, 2] of (position in document_index, token offset), int32 or int64.
        shuffle_index: uint32 or int64 [samples], the order in which samples are drawn.
        num_epochs: repetitions of the documents.
    """

    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]
    num_epochs: int

    def __len__(self) -> int:
        return len(self.shuffle_index)


def build_sample_order(
    lengths: NDArray[np.int32],
    documents: range,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
) -> SampleOrder:
    """Build the indices of one split of one token file.

    Args:
        lengths: int32 [sequences in the file].
        documents: the consecutive sequences that form the split; they hold at least one token together.
        seq_length: tokens a sample feeds to the model; a sample reads one more.
        num_samples: samples wanted, None for those of one epoch.
        seed: of the shuffles.
    """
    tokens_per_epoch = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    epochs = plan_epochs(tokens_per_epoch, seq_length, num_samples)
    random = np.random.RandomState(seed)
    document_index = build_document_index(documents, epochs, random)
    sample_index = build_sample_index(lengths, document_index, seq_length, epochs.num_samples)
    shuffle_index = build_shuffle_index(epochs, random)
    return SampleOrder(document_index, sample_index, shuffle_index, epochs.num_epochs)


def build_document_index(
    documents: range, epochs: EpochPlan, random: np.random.RandomState
) -> NDArray[np.int32]:
    """All epochs' documents shuffled as a whole; a separate last epoch is shuffled apart and appended."""
    one_epoch = np.arange(documents.start, documents.stop, dtype=np.int32)
    together = np.tile(one_epoch, epochs.num_epochs - epochs.separate_last)
    random.shuffle(together)
    if not epochs.separate_last:
        return together
    random.shuffle(one_epoch)
    return np.concatenate([together, one_epoch])


def build_sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], seq_length: int, num_samples: int
) -> NDArray[Any]:
    """Where each sample starts, token k * seq_length of the stream: (position, offset) [samples + 1, 2]."""
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    starts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, starts, side="right")
    offsets = starts - ends[positions] + lengths[document_index[positions]]
    # The walk starts at the very first document, also when that one is empty.
    positions[0] = offsets[0] = 0
    dtype = np.int32 if len(document_index) <= INT32_MAX else np.int64
    return np.stack([positions, offsets], axis=1).astype(dtype)


def build_shuffle_index(epochs: EpochPlan, random: np.random.RandomState) -> NDArray[Any]:
    """The order of drawing: one permutation, or two joined when the last epoch is kept apart."""
    dtype = np.uint32 if epochs.num_samples < UINT32_MAX - 1 else np.int64
    shuffle_index = np.arange(epochs.num_samples, dtype=dtype)
    random.shuffle(shuffle_index[: epochs.before_last])
    if epochs.separate_last:
        random.shuffle(shuffle_index[epochs.before_last :])
    return shuffle_index
