"""Reading token files: random access to a `.bin/.idx` pair without copying it.

The index is memory-mapped; the tokens are memory-mapped too, or read piece by piece with `mmap=False`
(`--no-mmap-bin-files`), for file systems on which mapping is slow. The pair is checked when it is opened, so
that a file cut short stops the run before its first step and not in the middle of it.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redline.data.layout import Index, as_prefix, bin_path, exclusive_cumsum, idx_path, read_index
from redline.errors import DataError
from redline.files import os_errors_as


def concat_ranges(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """arange(starts[i], starts[i] + lengths[i]) for each i, one after the other.

    Shapes: [P], [P] -> int64 [sum of lengths].
    """
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    shift = starts - exclusive_cumsum(lengths)
    return np.repeat(shift, lengths) + np.arange(lengths.sum(), dtype=np.int64)


def _how_to_find(prefix: Path) -> str:
    """What to do about a prefix without its files: name those that begin with it, if there are any."""
    beside = (path for path in prefix.parent.glob("*.idx") if path.name.startswith(prefix.name))
    near = sorted(str(path.with_suffix("")) for path in (*beside, *prefix.glob("*.idx")))
    if near := [path for path in near if path != str(prefix)]:
        return f"did you mean {' or '.join(near[:3])}?"
    if re.fullmatch(r"[0-9.]+", str(prefix)):
        return "a number is a weight where weights and prefixes alternate: 0.7 first 0.3 second."
    return "check the path, or make the pair with `redline data prepare`."


class IndexedDataset:
    """One `.bin/.idx` pair, read only.

    Args:
        prefix: the path without suffix (either file's own path is accepted too).
        mmap: map `.bin` into memory; False reads only the bytes asked for.
    Raises: DataError when a file is missing, cut short, too long or inconsistent.
    """

    def __init__(self, prefix: str | Path, *, mmap: bool = True) -> None:
        self.prefix = as_prefix(prefix)
        self.bin_path = bin_path(self.prefix)
        for path in (idx_path(self.prefix), self.bin_path):
            if not path.is_file():
                raise DataError(
                    f"there is no file {path}.",
                    why=f"data is named by the common prefix of a .bin and an .idx file, here {self.prefix}.",
                    mend=_how_to_find(self.prefix),
                )
        self.index: Index = read_index(idx_path(self.prefix))
        self.num_tokens = int(self.index.lengths.sum(dtype=np.int64))
        self._check()
        itemsize = self.index.dtype.itemsize
        self._starts = self.index.pointers // itemsize  # in tokens
        self._tokens: NDArray[Any] | None = None
        with os_errors_as(DataError, self.bin_path, "read"):
            if self.num_tokens == 0:
                self._tokens = np.empty(0, self.index.dtype)
            elif mmap:
                self._tokens = np.asarray(np.memmap(self.bin_path, self.index.dtype, mode="r"))
            else:
                self._handle = os.open(self.bin_path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._handle)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Storage dtype of the tokens."""
        return self.index.dtype

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, int32 [num_sequences]."""
        return self.index.lengths

    @property
    def num_sequences(self) -> int:
        """Sequences in the file: the unit that is split, shuffled and sampled."""
        return len(self.index.lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the file; a document holds one sequence unless sentences were split."""
        return max(len(self.index.boundaries) - 1, 0)

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, number: int) -> NDArray[Any]:
        """The tokens of one sequence: a view of the file when it is mapped."""
        return self.get(range(self.num_sequences)[number])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.get(number) for number in range(self.num_sequences))

    def get(self, number: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """`length` tokens (None: the rest) of sequence `number`, from its token `offset` on."""
        held = int(self.lengths[number])
        length = held - offset if length is None else length
        if not 0 <= offset <= offset + length <= held:
            raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {held}")
        return self._read(int(self._starts[number]) + offset, length)

    def gather(self, numbers: NDArray[Any], offsets: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
        """Pieces of several sequences, joined.

        Shapes: three arrays [P] -> tokens [sum of lengths] in the storage dtype.
        """
        starts = self._starts[numbers] + offsets
        if self._tokens is not None:
            return self._tokens[concat_ranges(starts, lengths)]
        pieces = [self._read(*piece) for piece in zip(starts.tolist(), lengths.tolist(), strict=True)]
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def describe(self, number: int) -> str:
        """A sequence, as an error message names it."""
        return f"{self.bin_path}, document {number}"

    def _read(self, start: int, length: int) -> NDArray[Any]:
        """`length` tokens from token `start` of the file on."""
        if self._tokens is not None:
            return self._tokens[start : start + length]
        itemsize = self.dtype.itemsize
        found = bytearray()
        with os_errors_as(DataError, self.bin_path, "read"):
            # One pread returns at most about 2 GiB.
            while missing := length * itemsize - len(found):
                piece = os.pread(self._handle, missing, start * itemsize + len(found))
                if not piece:
                    raise OSError(0, "the file has been cut short since it was opened")
                found += piece
        return np.frombuffer(found, self.dtype)

    def _check(self) -> None:
        """Hold the index against itself and against the size of `.bin`."""
        index, itemsize = self.index, self.index.dtype.itemsize
        with os_errors_as(DataError, self.bin_path, "read"):
            held = self.bin_path.stat().st_size
        wanted = self.num_tokens * itemsize
        if held != wanted:
            raise DataError(
                f"{self.bin_path} holds {held} bytes, but its index describes {wanted} bytes.",
                why=f"{self.num_tokens} tokens of {index.dtype.name} take {wanted} bytes: the file was cut "
                "short, or belongs to another index.",
                mend="prepare the data again, or copy both files again.",
            )
        boundaries = index.boundaries
        sound = (
            (index.lengths >= 0).all()
            and (index.pointers >= 0).all()
            and (index.pointers % itemsize == 0).all()
            and (index.pointers + index.lengths * np.int64(itemsize) <= held).all()
            and len(boundaries) > 0
            and boundaries[0] == 0
            and boundaries[-1] == len(index.lengths)
            and (np.diff(boundaries) >= 0).all()
        )
        if not sound:
            raise DataError(
                f"{idx_path(self.prefix)} is damaged.",
                why="its lengths, offsets and document boundaries do not describe pieces of the .bin file.",
                mend="prepare the data again, or copy both files again.",
            )
