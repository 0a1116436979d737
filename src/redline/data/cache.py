"""Index arrays kept on disk between runs (`--data-cache-path`).

The key is a hash of what the arrays are computed from, never of a path or a date, so that moved or changed
data cannot meet a stale cache. A file that is missing, damaged or cut short only means that the arrays are
built again.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from redline.errors import DataError
from redline.files import os_errors_as, write_atomic, write_json_atomic

Arrays = Mapping[str, NDArray[Any]]


def digest_of(*parts: object) -> str:
    """A hash of arrays (by dtype, shape and content) and of values (by their repr)."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            state.update(f"{part.dtype.str}{part.shape}".encode())
            state.update(np.ascontiguousarray(part).data)
        else:
            state.update(repr(part).encode())
        state.update(b"\x1f")
    return state.hexdigest()


def cached_arrays(folder: Path | None, parts: Sequence[object], build: Callable[[], Arrays]) -> Arrays:
    """The arrays of `build`, from `folder` when they are there whole (memory-mapped), else built and stored.

    Args:
        folder: the cache; None builds without storing.
        parts: everything that `build` depends on.
    Raises: DataError when the folder cannot be written.
    """
    if folder is None:
        return build()
    key = digest_of(*parts)
    found = _load(folder, key)
    if found is not None:
        return found
    arrays = build()
    with os_errors_as(DataError, folder, "write the index cache (--data-cache-path) into"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in arrays.items():
            write_atomic(_array_path(folder, key, name), partial(_save, values))
        write_json_atomic(folder / f"{key}.json", {name: _seal(v) for name, v in arrays.items()})
    return arrays


def _save(values: NDArray[Any], handle: BinaryIO) -> None:
    np.save(handle, values, allow_pickle=False)


def _array_path(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}-{name}.npy"


def _seal(values: NDArray[Any]) -> dict[str, Any]:
    """What a stored array must look like to be believed."""
    crc = zlib.crc32(np.ascontiguousarray(values).data)
    return {"dtype": values.dtype.str, "shape": list(values.shape), "crc32": crc}


def _load(folder: Path, key: str) -> Arrays | None:
    """The stored arrays, or None when anything about them is amiss."""
    try:
        seals = json.loads((folder / f"{key}.json").read_text())
        arrays = {
            name: np.load(_array_path(folder, key, name), mmap_mode="r", allow_pickle=False) for name in seals
        }
        sound = all(_seal(arrays[name]) == seal for name, seal in seals.items())
    except (OSError, ValueError, AttributeError, TypeError, EOFError):
        return None
    return arrays if sound else None
