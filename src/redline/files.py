"""Files that are either whole or absent: written aside, fsynced, renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from redline.errors import RedlineError


@contextmanager
def os_errors_as(error: type[RedlineError], path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError (disk full, no permission, missing folder) into `error`, naming `path`."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise error(
            f"cannot {doing} {path}: {reason}.",
            why="the operating system refused it; what existed before is unchanged.",
            mend="free space on that disk, correct its permissions, or name another place.",
        ) from exc


def fsync_dir(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` on a temporary neighbour of `path`, fsync it and rename it onto `path`.

    On any exception the temporary file is removed and `path` keeps its old content.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """`write_atomic` of UTF-8 text."""
    write_atomic(path, lambda handle: handle.write(text.encode()))


def write_json_atomic(path: Path, value: Any) -> None:
    """`write_atomic` of JSON that forbids NaN, indented, with a final newline."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
