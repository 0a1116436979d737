"""What a checkpoint folder consists of: the list of its files with their sizes and checksums.

`manifest.json` is the last file written into a folder and names every other one. A folder is sound when each
named file is there, has its size and (on request) its CRC-32; files without an entry are never opened.

CRC-32 finds every burst of damage up to 32 bits and misses other damage with probability 2^-32, at 1 to 4
GB/s a core. A cryptographic hash (blake2b) costs two to five times as much and would add nothing: somebody
who can change a file of the folder can change the manifest beside it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.errors import CheckpointError
from redline.files import os_errors_as

FORMAT = "redline-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
METADATA = "metadata.json"
VALUES = "values.json"

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and CRC-32 (eight hexadecimal digits) of one file."""

    bytes: int
    crc32: str


def sum_file(path: Path, *, sync: bool = False) -> FileSum:
    """Read `path` once in blocks; with `sync`, first force its content onto the disk. Raises OSError."""
    block = memoryview(bytearray(_BLOCK_BYTES))
    crc = size = 0
    with open(path, "rb", buffering=0) as handle:
        if sync:
            os.fsync(handle.fileno())
        while count := handle.readinto(block):
            crc = zlib.crc32(block[:count], crc)
            size += count
    return FileSum(size, f"{crc:08x}")


def write_synced(path: Path, content: bytes) -> FileSum:
    """Write a small file, force it onto the disk and return its sum. Raises OSError."""
    with open(path, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    return FileSum(len(content), f"{zlib.crc32(content):08x}")


def write_manifest(folder: Path, iteration: int, files: Mapping[str, FileSum]) -> None:
    """Write `manifest.json`, which makes `folder` readable as a checkpoint. Raises OSError."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    write_synced(folder / MANIFEST, to_json(manifest))


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """The files of a checkpoint by name. Raises CheckpointError when there is no whole manifest."""
    manifest = read_json(folder / MANIFEST)
    try:
        if manifest["format"] != FORMAT:
            raise ValueError(f"format is {manifest['format']!r}")
        if manifest["version"] > VERSION:
            raise CheckpointError(
                f"{folder} has checkpoint format {manifest['version']}; this Redline reads up to {VERSION}.",
                mend="load it with the version of Redline that wrote it, or a newer one.",
            )
        files = {name: FileSum(int(f["bytes"]), str(f["crc32"])) for name, f in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise damaged(folder / MANIFEST, f"it is not a manifest of {FORMAT} ({exc})") from exc
    for name in files:
        if Path(name).name != name:
            raise damaged(folder / MANIFEST, f"it names {name!r}, which is outside the folder")
    return files


def find_damage(
    folder: Path, files: Mapping[str, FileSum], names: Iterable[str] | None = None, *, checksums: bool
) -> str | None:
    """The first file that is not as the manifest says, in words; None when all are.

    Args:
        folder, files: the checkpoint and its manifest.
        names: the files to look at (default: all of the manifest).
        checksums: also read each file whole and compare its CRC-32.
    """
    for name in files if names is None else names:
        path, wanted = folder / name, files.get(name)
        if wanted is None:
            return f"{path} has no entry in the manifest"
        try:
            size = path.stat().st_size
            if size != wanted.bytes:
                return f"{path} has {size} bytes, its manifest says {wanted.bytes}"
            found = sum_file(path) if checksums else wanted
        except OSError as exc:
            return f"{path} cannot be read ({exc.strerror or exc})"
        if found != wanted:
            return f"{path} has checksum {found.crc32}, its manifest says {wanted.crc32}"
    return None


def read_json(path: Path) -> Any:
    """Parse one JSON file of a checkpoint. Raises CheckpointError."""
    with os_errors_as(CheckpointError, path, "read"):
        content = path.read_bytes()
    try:
        return json.loads(content)
    except ValueError as exc:
        raise damaged(path, f"it is not whole JSON ({exc})") from exc


def to_json(value: Any) -> bytes:
    """UTF-8 JSON, one item a line. Raises ValueError on NaN and infinities."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file or folder that is not what was written."""
    return CheckpointError(
        f"{path} is damaged.",
        why=f"{why}.",
        mend="load an older one with --ckpt-step; this one cannot be trusted.",
    )
