"""Packing: whole documents side by side in samples of one size, by a bin packer that sees lengths only.

A document of n + 1 tokens makes n predictions, so it takes n places: its last token is a label, never an
input, and no label comes from another document. A document longer than a sample is cut into pieces of
`seq_length` predictions and a rest; the token at a cut is the label of one piece and the first input of the
next, so no prediction is lost.

The packer is best-fit decreasing: the longest piece first, each into the fullest sample that still has room.
It runs on the histogram of lengths (the idea of Krell et al. 2021, arXiv 2107.02027), since equal lengths are
alike to it: its time grows with the number of different lengths, not with that of documents. All epochs have
the same samples by length; which document of a length goes where, and the order of the samples, is drawn anew
each epoch. Everything is a function of (lengths, range, seq_length, seed), and a sample of its number alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redline.data.indexed import concat_ranges

LOSS_FOR_FEWER_DOCUMENTS = 0.01  # more samples than without a bound on the documents in one
FEWEST_BOUND = 16


@dataclass(frozen=True, slots=True)
class Pieces:
    """What is packed: `length` predictions from token `offset` of `document` on; arrays of one size [P]."""

    document: NDArray[np.int32]
    offset: NDArray[np.int32]
    length: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Bins:
    """Samples alike: `count` of them, each with `contents`: (length, how many), longest first."""

    count: int
    contents: tuple[tuple[int, int], ...]

    @property
    def documents(self) -> int:
        """Pieces in each."""
        return sum(copies for _, copies in self.contents)


@dataclass(frozen=True, slots=True)
class PackedOrder:
    """The index of one data set.

    Attributes:
        document, offset, length: of each piece, [P].
        bound: bin b holds the slots bound[b] .. bound[b + 1]; int64 [bins + 1].
        piece: the piece in each slot, by epoch; int32 or int64 [epochs, P].
        shuffle: the order in which the bins of an epoch are drawn; [epochs, bins].
    """

    document: NDArray[np.int32]
    offset: NDArray[np.int32]
    length: NDArray[np.int32]
    bound: NDArray[np.int64]
    piece: NDArray[Any]
    shuffle: NDArray[Any]

    def __len__(self) -> int:
        return int(self.shuffle.size)

    @property
    def max_documents(self) -> int:
        """The most segments of one sample: its pieces, and what pads it."""
        return int(np.diff(self.bound).max()) + 1

    def pieces(self, numbers: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The pieces of samples `numbers`, joined, and how many each sample has."""
        epochs, places = np.divmod(numbers, self.shuffle.shape[1])
        bins = self.shuffle[epochs, places].astype(np.int64)
        counts = self.bound[bins + 1] - self.bound[bins]
        slots = concat_ranges(self.bound[bins], counts)
        return self.piece[np.repeat(epochs, counts), slots], counts


def cut_pieces(lengths: NDArray[np.int32], documents: range, seq_length: int) -> Pieces:
    """Every document of the range as pieces of at most `seq_length` predictions; one token makes none."""
    predictions = np.maximum(lengths[documents.start : documents.stop].astype(np.int64) - 1, 0)
    counts = -(-predictions // seq_length)
    which = np.repeat(np.arange(len(predictions)), counts)
    offsets = concat_ranges(np.zeros(len(counts), np.int64), counts) * seq_length
    sizes = np.minimum(predictions[which] - offsets, seq_length)
    return Pieces(
        (which + documents.start).astype(np.int32), offsets.astype(np.int32), sizes.astype(np.int32)
    )


def pack(histogram: NDArray[np.int64], seq_length: int) -> list[Bins]:
    """Best-fit decreasing with as few documents in a sample as cost next to nothing.

    Without a bound the last samples hold nothing but the shortest documents, hundreds of them, and the array
    of boundaries is as long as the longest list in the run.

    Args:
        histogram: pieces of each length, [seq_length + 1]; length 0 does not count.
    """
    free = best_fit(histogram, seq_length, seq_length)
    most = sum(bins.count for bins in free) * (1 + LOSS_FOR_FEWER_DOCUMENTS)
    bound = FEWEST_BOUND
    while bound < seq_length:
        bounded = best_fit(histogram, seq_length, bound)
        if sum(bins.count for bins in bounded) <= most:
            return bounded
        bound *= 2
    return free


def best_fit(histogram: NDArray[np.int64], seq_length: int, max_documents: int) -> list[Bins]:
    """Best-fit decreasing with at most `max_documents` in a sample; the result is in order of making."""
    rooms: list[int] = []  # places left in the groups below, ascending
    groups: dict[int, list[Bins]] = {}
    closed: list[Bins] = []

    def keep(count: int, contents: tuple[tuple[int, int], ...], room: int) -> None:
        bins = Bins(count, contents)
        if room == 0 or bins.documents == max_documents:
            closed.append(bins)
            return
        if room not in groups:
            groups[room] = []
            insort(rooms, room)
        groups[room].append(bins)

    for length in range(seq_length, 0, -1):
        left = int(histogram[length])
        while left:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                bins = groups[room].pop()
                if not groups[room]:
                    del groups[room], rooms[place]
            else:
                room, bins = seq_length, Bins(left, ())  # as many new ones as could be needed
            fit = min(room // length, max_documents - bins.documents)
            filled = min(left // fit, bins.count)
            rest = min(left - filled * fit, fit) if filled < bins.count else 0
            left -= filled * fit + rest
            if filled:
                keep(filled, (*bins.contents, (length, fit)), room - fit * length)
            if rest:
                keep(1, (*bins.contents, (length, rest)), room - rest * length)
            untouched = bins.count - filled - (rest > 0)
            if untouched and bins.contents:
                keep(untouched, bins.contents, room)
    return closed + [bins for room in rooms for bins in groups[room]]


def build_packed_order(
    lengths: NDArray[np.int32], documents: range, *, seq_length: int, num_samples: int | None, seed: int
) -> PackedOrder:
    """Build the index of one split of one token file.

    Args:
        lengths: int32 [sequences in the file].
        documents: the consecutive sequences that form the split.
        seq_length: places of a sample.
        num_samples: samples wanted, None for those of one epoch; a wish for more does not change the first.
        seed: of the shuffles.
    """
    pieces = cut_pieces(lengths, documents, seq_length)
    histogram = np.bincount(pieces.length, minlength=seq_length + 1)
    packed = pack(histogram, seq_length)
    sizes = np.repeat([bins.documents for bins in packed], [bins.count for bins in packed])
    slot_lengths = np.concatenate([_slots(bins) for bins in packed]) if packed else np.zeros(0, np.int64)
    bound = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    num_epochs = 1 if num_samples is None else max(1, -(-num_samples // max(len(sizes), 1)))
    slots_by_length = np.argsort(-slot_lengths, kind="stable")
    dtype = np.int32 if len(pieces.length) < np.iinfo(np.int32).max else np.int64
    piece = np.empty((num_epochs, len(pieces.length)), dtype)
    shuffle = np.empty((num_epochs, len(sizes)), dtype)
    random = np.random.RandomState(seed)
    for epoch in range(num_epochs):
        drawn = random.permutation(len(pieces.length))
        piece[epoch, slots_by_length] = drawn[np.argsort(-pieces.length[drawn], kind="stable")]
        shuffle[epoch] = random.permutation(len(sizes))
    return PackedOrder(pieces.document, pieces.offset, pieces.length, bound, piece, shuffle)


def _slots(bins: Bins) -> NDArray[np.int64]:
    """The lengths of every slot of a group, sample by sample."""
    lengths, copies = np.array(bins.contents, np.int64).T
    return np.tile(np.repeat(lengths, copies), bins.count)
