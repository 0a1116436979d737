"""The bytes of a `.bin`/`.idx` pair, as Megatron-LM defines them.

`<prefix>.bin` is the raw token array. `<prefix>.idx`, little endian:

    offset  bytes   field
    0       9       magic b"MMIDIDX" and two zero bytes
    9       8       version, uint64 = 1
    17      1       dtype code (DTYPES)
    18      8       number of sequences N, uint64
    26      8       length of the document array (documents + 1), uint64
    34      4 N     sequence lengths, int32
    ...     8 N     byte offset of each sequence in .bin, int64
    ...     8 (documents + 1)   document boundaries as sequence numbers, int64, first 0
    ...     N       modes, int8 (multimodal files only)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from redline.errors import DataError
from redline.files import os_errors_as

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# The largest vocabulary that is stored in two bytes (Megatron-LM's own bound, a little below 2**16).
UINT16_VOCAB_LIMIT = 65500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The storage dtype for ids of a vocabulary: uint16 below 65500 entries, int32 from there on."""
    return DTYPES[8] if vocab_size < UINT16_VOCAB_LIMIT else DTYPES[4]


def bin_path(prefix: Path) -> Path:
    """`<prefix>.bin`; a dot in the prefix is part of the name."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`<prefix>.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def as_prefix(path: str | Path) -> Path:
    """The prefix of a pair, given as such or as either of its two files."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def exclusive_cumsum(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """[3, 1, 4] -> [0, 3, 4], in 64 bits whatever the input's width."""
    starts = np.cumsum(lengths, dtype=np.int64)
    starts -= lengths
    return starts


@dataclass(frozen=True, slots=True)
class Index:
    """The content of one `.idx`.

    Attributes:
        dtype: of the tokens in `.bin`.
        lengths: int32 [N], tokens of each sequence.
        pointers: int64 [N], byte offset of each sequence.
        boundaries: int64 [documents + 1], the first sequence of each document, then N.
        modes: int8 [N] for multimodal files, else None.
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None

    @classmethod
    def contiguous(
        cls, dtype: np.dtype[Any], lengths: NDArray[np.int32], boundaries: NDArray[np.int64]
    ) -> Index:
        """The index of sequences that follow one another in `.bin`; byte offsets are 64 bits wide."""
        return cls(dtype, lengths, exclusive_cumsum(lengths) * dtype.itemsize, boundaries)

    def write(self, handle: BinaryIO) -> None:
        """Write the whole `.idx`."""
        handle.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(self.lengths), len(self.boundaries)))
        handle.write(np.ascontiguousarray(self.lengths, "<i4").data)
        handle.write(np.ascontiguousarray(self.pointers, "<i8").data)
        handle.write(np.ascontiguousarray(self.boundaries, "<i8").data)
        if self.modes is not None:
            handle.write(np.ascontiguousarray(self.modes, "i1").data)


def read_index(path: Path) -> Index:
    """Map `path` and check its header and size; the arrays are views of the file.

    Raises: DataError when the file is missing, is no index, is cut short or is too long.
    """
    with os_errors_as(DataError, path, "read"):
        raw = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    if len(raw) < HEADER.size:
        raise _broken(path, f"it holds {len(raw)} bytes, the header alone has {HEADER.size}.")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _broken(path, f"it begins with {magic!r}, an index begins with {MAGIC!r}.")
    if version != VERSION:
        raise _broken(path, f"its format version is {version}, this program reads version {VERSION}.")
    if code not in DTYPES:
        raise _broken(path, f"its dtype code is {code}, the codes are 1 to {max(DTYPES)}.")
    size = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if len(raw) not in (size, size + num_sequences):
        kind = "cut short" if len(raw) < size else "longer than its header says"
        raise _broken(
            path, f"it is {kind}: {len(raw)} bytes, but {num_sequences} sequences need {size} bytes."
        )
    start = HEADER.size
    lengths = np.frombuffer(raw, "<i4", num_sequences, start)
    pointers = np.frombuffer(raw, "<i8", num_sequences, start + 4 * num_sequences)
    boundaries = np.frombuffer(raw, "<i8", num_boundaries, start + 12 * num_sequences)
    has_modes = len(raw) > size
    modes = np.frombuffer(raw, "i1", num_sequences, size) if has_modes else None
    return Index(DTYPES[code], lengths, pointers, boundaries, modes)


def _broken(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is not a whole Megatron index.",
        why=why,
        mend="prepare the data again (`redline data prepare ... --overwrite`), or copy the file again.",
    )
