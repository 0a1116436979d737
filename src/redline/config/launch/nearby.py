"""Files that lie beside a script, or below it; no other file is ever opened."""

from __future__ import annotations

from pathlib import Path

from redline.config.launch.bash import MAX_BYTES, read_bytes
from redline.config.launch.shell import Notes
from redline.config.launch.values import Hole, Lit, Place, Text
from redline.errors import DataError


def beside(name: Text, notes: Notes) -> Path | None:
    """The regular file that a script names, in the folder of the script or below; never elsewhere."""
    tail = ""
    for segment in name:
        tail = "" if isinstance(segment, Hole) else tail + segment.text
    if not tail or len(tail) > 4096 or "\0" in tail:
        return None
    home = notes.script.parent
    if tail.startswith("/") and not any(isinstance(segment, Hole) for segment in name):
        candidates = [Path(tail)]
    else:
        relative = tail.lstrip("/")
        candidates = [home / relative, home / Path(relative).name]
    top = home.resolve()
    for candidate in candidates:
        try:
            path = candidate.resolve()
            if path.is_relative_to(top) and path.is_file() and path.stat().st_size <= MAX_BYTES:
                return home / path.relative_to(top)  # as the script itself was named
        except (OSError, ValueError, RuntimeError):
            continue
    return None


def text_beside(name: Text, notes: Notes) -> Text | None:
    """What such a file says, each line with its place, as $(cat file) gives it; None when it is not there."""
    path = beside(name, notes)
    if path is None:
        return None
    try:
        lines = read_bytes(path).decode("utf-8", "replace").rstrip("\n").splitlines(keepends=True)
    except DataError:
        return None
    return tuple(Lit(line, Place(path, number)) for number, line in enumerate(lines, 1))
