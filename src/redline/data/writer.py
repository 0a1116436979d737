"""Writing token files: `.bin` is streamed, `.idx` is kept in memory (12 bytes a document) until the end.

Both are written under hidden names, fsynced and renamed, `.idx` last: a pair exists whole or not at all, and
what stood there before stays until the new pair is complete on disk.
"""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from redline.data.layout import CODES, Index, bin_path, idx_path
from redline.errors import DataError
from redline.files import fsync_dir, os_errors_as

MAX_LENGTH = np.iinfo(np.int32).max


class IndexedWriter:
    """Writes one pair; leaving the `with` block normally publishes it, leaving it by an exception drops it.

    Args:
        prefix: the path without suffix; its folder is made when missing.
        dtype: one of the eight storage dtypes (`layout.DTYPES`).
        overwrite: replace an existing pair; without it an existing file is an error.
    Raises: DataError when files exist already, the folder cannot be written, the disk is full, or a token
        does not fit the dtype.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any], *, overwrite: bool = False) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        assert self.dtype in CODES, self.dtype
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._paths = (bin_path(self.prefix), idx_path(self.prefix))
        if not overwrite:
            refuse_existing(*self._paths)
        self._asides = tuple(path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in self._paths)
        with os_errors_as(DataError, self.prefix.parent, "write into"):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin: BinaryIO = open(self._asides[0], "wb")  # noqa: SIM115 (closed by finish or abandon)

    def add_document(self, *sequences: ArrayLike) -> None:
        """Append one document, made of one sequence of tokens (or several, for split sentences)."""
        for sequence in sequences:
            self._append(np.asarray(sequence), np.array([np.size(sequence)]))
        self._boundaries.append(len(self._lengths))

    def add_documents(self, tokens: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Append many documents of one sequence each.

        Shapes: tokens [sum of lengths], lengths [documents].
        """
        self._append(tokens, lengths)
        ends = np.arange(1 - len(lengths), 1, dtype=np.int64) + len(self._lengths)
        self._boundaries.frombytes(ends.tobytes())

    def finish(self) -> None:
        """Make the pair durable and visible."""
        index = Index.contiguous(
            self.dtype, np.frombuffer(self._lengths, np.int32), np.frombuffer(self._boundaries, np.int64)
        )
        with os_errors_as(DataError, self._paths[1], "write"), open(self._asides[1], "wb") as handle:
            index.write(handle)
            _sync(handle)
        with os_errors_as(DataError, self._paths[0], "write"):
            _sync(self._bin)
            self._bin.close()
            # An old index never stands beside new tokens, whatever moment the machine stops at.
            self._paths[1].unlink(missing_ok=True)
            for aside, path in zip(self._asides, self._paths, strict=True):
                os.replace(aside, path)
            fsync_dir(self.prefix.parent)

    def abandon(self) -> None:
        """Remove what was written aside; an existing pair stays as it was."""
        with suppress(OSError):  # closing flushes, which a full disk refuses
            self._bin.close()
        for aside in self._asides:
            aside.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abandon()

    def _append(self, tokens: NDArray[Any], lengths: NDArray[np.integer[Any]]) -> None:
        longest = int(lengths.max(initial=0))
        if longest > MAX_LENGTH:
            raise DataError(
                f"a document of {longest} tokens does not fit {self.prefix}.",
                why=f"the format stores lengths in 32 bits: at most {MAX_LENGTH} tokens a document.",
                mend="split the document.",
            )
        with os_errors_as(DataError, self._paths[0], "write"):
            self._bin.write(np.ascontiguousarray(self._fit(tokens)).data)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())

    def _fit(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """The tokens in the storage dtype; integers that would wrap around are an error."""
        if tokens.size and self.dtype.kind in "iu" and not np.can_cast(tokens.dtype, self.dtype):
            bounds = np.iinfo(self.dtype)
            low, high = tokens.min(), tokens.max()
            if low < bounds.min or high > bounds.max:
                raise DataError(
                    f"token ids {low} to {high} do not fit {self.dtype.name}, the storage of {self.prefix}.",
                    why=f"{self.dtype.name} holds {bounds.min} to {bounds.max}.",
                    mend="give the tokenizer's true vocabulary size, which decides the storage dtype.",
                )
        return tokens.astype(self.dtype, copy=False)


def refuse_existing(*paths: Path) -> None:
    """Raise DataError when one of the files exists already."""
    for path in paths:
        if path.exists():
            raise DataError(
                f"{path} exists already.",
                why="prepared data is not replaced unasked.",
                mend="add --overwrite, or name another --output-prefix.",
            )


def _sync(handle: BinaryIO) -> None:
    handle.flush()
    os.fsync(handle.fileno())
