"""The processes of a machine, as the scripts here and the tests of ranks that are killed see them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(parent: int) -> list[int]:
    """Processes whose parent that is: fields 1 and 4 of proc(5)'s stat."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            head, rest = path.read_text().rsplit(")", 1)
            found += [int(head.split()[0])] if int(rest.split()[1]) == parent else []
    return found
