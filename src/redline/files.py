"""Files that are either whole or absent: written aside, fsynced, renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from redline.errors import RedlineError

Refusal = TypeVar("Refusal", bound=RedlineError)

# What helps against each refusal; anything else gets all of it.
_MENDS = {
    errno.ENOSPC: "free space on that disk, or name a place on another one.",
    errno.EDQUOT: "free space within your quota, or name a place on another disk.",
    errno.EACCES: "correct its permissions, or name another place.",
    errno.EPERM: "correct its permissions, or name another place.",
    errno.EROFS: "that disk is read-only: name a place on another one.",
    errno.EEXIST: "a file stands where a folder is needed: name another place.",
    errno.ENOTDIR: "a file stands where a folder is needed: name another place.",
    errno.EISDIR: "a folder stands where a file is needed: name another place.",
    errno.ENOENT: "check the path, or name another place.",
}
_ANY_MEND = "free space on that disk, correct its permissions, or name another place."


@contextmanager
def os_errors_as(error: type[RedlineError], path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError (disk full, no permission, missing folder) into `error`, naming `path`."""
    try:
        yield
    except OSError as exc:
        raise refusal(error, exc, f"{doing} {path}") from exc


def refusal(error: type[Refusal], exc: OSError, doing: str) -> Refusal:
    """The `error` that says what the operating system refused ("write /data/x") and what helps against it."""
    return error(
        f"cannot {doing}: {exc.strerror or exc}.",
        why="the operating system refused it; what existed before is unchanged.",
        mend=_MENDS.get(exc.errno or 0, _ANY_MEND),
    )


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


def discard(stream: TextIO) -> None:
    """Let whatever is still printed to stdout or stderr go nowhere: its reader is gone (`| head`)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
