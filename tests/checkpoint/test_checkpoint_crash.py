"""Kills, full disks and folders that cannot be written: the last complete checkpoint always survives."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.checkpoint import (
    AsyncWriter,
    find_latest,
    folders,
    load_checkpoint,
    manifest,
    read_values,
    save_checkpoint,
    writer,
)
from redline.errors import CheckpointError

Fork = Callable[[Callable[[], object]], int]
KILLS = 20


def state(count: int) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.full((64, 256), float(count + n)) for n in range(4)}


def train(root: Path, pipe: int, *, background: bool, same_iteration: bool) -> None:
    """Resume and save without end; report the number of each save that is known to be complete."""
    found = find_latest(root, verify=True)
    count = read_values(found.folder)["count"] + 1 if found.folder else 0
    with AsyncWriter() as thread:
        while True:
            iteration = 7 if same_iteration else count
            save_checkpoint(
                root, iteration, state(count), {"count": count}, keep=2, writer=thread if background else None
            )
            os.write(pipe, struct.pack("q", count - background))
            count += 1


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("same_iteration", [False, True])
def test_b100_sigkill_at_random_moments(
    tmp_path: Path, fork: Fork, background: bool, same_iteration: bool
) -> None:
    """At most one interval is lost: what the run knew to be complete is there, whole, after each kill."""
    chance, cut, count = random.Random(f"{background} {same_iteration}"), 0, -1
    for _ in range(KILLS // 2):
        reader, pipe = os.pipe()
        how = {"background": background, "same_iteration": same_iteration}
        child = fork(lambda pipe=pipe, how=how: train(tmp_path, pipe, **how))
        os.close(pipe)
        promised = struct.unpack("q", os.read(reader, 8))[0]
        time.sleep(chance.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        while report := os.read(reader, 8):
            promised = struct.unpack("q", report)[0]
        os.close(reader)
        found = find_latest(tmp_path, verify=True)
        assert not any("using" in notice for notice in found.notices), "`latest` named a bad checkpoint"
        cut += any("did not finish" in notice for notice in found.notices)
        if found.folder is None:
            assert promised < 0, "killed in the first save of all"
            continue
        tensors = {name: torch.zeros(64, 256) for name in state(0)}
        resumed = load_checkpoint(found.folder, tensors)["count"]
        assert max(promised, count) <= resumed <= promised + 2
        assert all(torch.equal(tensors[name], tensor) for name, tensor in state(resumed).items())
        count = resumed
    assert cut, "no kill hit a save: the test tested nothing"
    save_checkpoint(tmp_path, count + 1, state(0), {"count": 0}, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) <= 3 and names[-1] == "latest" and not any("partial" in name for name in names)


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_a_file(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
    path.write_bytes(b"half")
    full()


@pytest.mark.parametrize(
    ("module", "name", "failure"),
    [
        (writer, "save_file", half_a_file),
        (writer, "sum_file", full),
        (writer, "write_synced", full),
        (manifest, "write_synced", full),
        (folders, "fsync_dir", full),
        (folders.os, "rename", full),
        (folders, "write_text_atomic", full),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, failure: Any, background: bool
) -> None:
    save_checkpoint(tmp_path, 1, state(1), {"count": 1}, keep=1)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error, AsyncWriter() as thread:
        patch.setattr(module, name, failure)
        save_checkpoint(tmp_path, 2, state(2), {"count": 2}, keep=1, writer=thread if background else None)
    assert "No space left on device" in error.value.what and error.value.mend
    assert not (tmp_path / "iter_0000002.partial").exists(), "the disk is given back"
    found = find_latest(tmp_path, verify=True)
    assert read_values(found.folder)["count"] == 1
    save_checkpoint(tmp_path, 2, state(2), {"count": 2}, keep=1)
    assert read_values(find_latest(tmp_path, verify=True).folder)["count"] == 2


def test_a_file_too_large_for_the_disk(tmp_path: Path, fork: Fork) -> None:
    """The operating system itself refuses in the middle of a file, here by a limit on file sizes."""
    save_checkpoint(tmp_path, 1, state(1), {"count": 1})

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(CheckpointError, match=r"iter_0000002.partial/rank_00000_0.*File too large"):
            save_checkpoint(tmp_path, 2, state(2), {"count": 2})

    assert os.waitpid(fork(work), 0)[1] == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["iter_0000001", "latest"]
    assert find_latest(tmp_path, verify=True).folder == tmp_path / "iter_0000001"


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for root in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(CheckpointError, match="cannot write checkpoints to") as error:
            save_checkpoint(root, 1, state(1), {})
        assert str(root) in error.value.what and error.value.exit_code == 1
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_root_without_permission(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state(1), {})
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            save_checkpoint(tmp_path, 2, state(2), {})
    finally:
        tmp_path.chmod(0o755)
    assert find_latest(tmp_path, verify=True).folder == tmp_path / "iter_0000001"
