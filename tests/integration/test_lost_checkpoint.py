"""A disk that is full for a while: what a run with saves in the background ends with."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from redline.checkpoint import find_latest, folders, list_checkpoints

from .conftest import TINY


@pytest.mark.parametrize(
    ("interval", "full_at", "code", "left", "told"),
    [
        (2, {4}, 0, [2, 6], [(4, 6)]),
        (2, {2, 6}, 1, [4], [(2, 4)]),
        (2, {4, 6}, 1, [2], [(4, 6)]),
        (4, {4}, 0, [6], [(4, 6)]),
    ],
    ids=["once", "twice, the last too", "twice in a row", "the first, then the last"],
)
def test_the_save_after_a_lost_one_is_made(
    redline: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interval: int,
    full_at: set[int],
    code: int,
    left: list[int],
    told: list[tuple[int, int]],
) -> None:
    """Each loss is told; a run ends with 0 only when its last checkpoint is there."""

    def commit(partial: Path, iteration: int, *keeping: int | None) -> None:
        if iteration in full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        folders.commit(partial, iteration, *keeping)

    monkeypatch.setattr("redline.checkpoint.writer.commit", commit)
    found, out, err = redline(f"train {TINY} --async-save --save-interval {interval} --save run")
    assert found == code, err
    root = tmp_path / "run" / "checkpoints"
    assert [int(folder.name.removeprefix("iter_")) for folder in list_checkpoints(root)] == left
    assert find_latest(root).folder == root / f"iter_{left[-1]:07d}"
    lines = [line for line in out.splitlines() if " is lost: " in line]
    assert len(lines) == len(told)
    for line, (lost, saved) in zip(lines, told, strict=True):
        assert f"step {saved}: the checkpoint of iteration {lost} is lost: cannot write" in line
        assert (
            "No space left on device" in line and f"That of iteration {saved} is now written at once" in line
        )
    assert ("No space left on device" in err) == (code == 1)
