"""A run that goes on where another one is about to end: nothing of that one's last steps is undone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from redline.checkpoint import find_latest
from redline.errors import CheckpointError, ConfigError
from redline.run import OpenRun, spine, train_opened
from redline.run.folder import open_folder

from .conftest import TINY
from .tiny import opened, parsed

SHORT = {"save_interval": 2, "eval_iters": 0, "async_save": False}


def trained(run: OpenRun) -> dict[str, Any]:
    summary = train_opened(run, time.perf_counter())
    assert summary is not None
    return summary


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def values(root: Path, steps: int, **more: Any) -> dict[str, Any]:
    return {**SHORT, "load": str(root), "save": str(root), "train_iters": steps, **more}


@pytest.mark.parametrize("begun", [0, 2], ids=["nothing", "a checkpoint"])
def test_what_was_saved_while_a_run_opened_is_not_undone(begun: int, tmp_path: Path) -> None:
    """It is refused, as the folder's lock was free again; the same command then goes on from the newest."""
    root = tmp_path / "run"
    if begun:
        trained(opened(tmp_path, values(root, begun)))
    successor = opened(tmp_path, values(root, 6))
    trained(opened(tmp_path, values(root, 4, keep_checkpoints=1)))
    before = contents(root)
    with pytest.raises(CheckpointError, match=r"another run has saved there meanwhile") as refused:
        train_opened(successor, time.perf_counter())
    assert "iter_0000004" in refused.value.what and str(root) in refused.value.what
    assert contents(root) == before

    again = opened(tmp_path, values(root, 6))
    assert again.state.iteration == 4
    trained(again)  # the lock has been released
    found = find_latest(root / "checkpoints").folder
    assert found is not None and found.name == "iter_0000006"


def test_a_checkpoint_that_is_written_anew_is_another_one(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trained(opened(tmp_path, values(root, 2)))
    successor = opened(tmp_path, values(root, 4))
    other = tmp_path / "other"
    trained(opened(tmp_path, {**values(other, 2), "seed": 5}))
    there, new = (each / "checkpoints" / "iter_0000002" for each in (root, other))
    there.rename(tmp_path / "old")
    new.rename(there)
    with pytest.raises(CheckpointError, match="now the folder leads to another iter_0000002"):
        train_opened(successor, time.perf_counter())


def test_a_run_that_loads_from_elsewhere_does_not_mind_what_is_saved_there(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trained(opened(tmp_path, values(root, 2)))
    branch = opened(tmp_path, {**values(root, 6), "save": str(tmp_path / "branch")})
    trained(opened(tmp_path, values(root, 4)))
    trained(branch)
    assert branch.state.iteration == 6


def test_a_step_that_was_chosen_is_gone_back_to(tmp_path: Path) -> None:
    """With --ckpt-step newer checkpoints play no part."""
    root = tmp_path / "run"
    trained(opened(tmp_path, values(root, 2)))
    back = opened(tmp_path, values(root, 6, ckpt_step=2))
    trained(opened(tmp_path, values(root, 4)))
    trained(back)
    assert back.state.iteration == 6


def test_a_folder_in_use_is_refused_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its run will still save or remove would be missed, or fail the load."""
    root = tmp_path / "run"
    trained(opened(tmp_path, values(root, 2)))

    def opens(*args: Any) -> None:
        raise AssertionError("a checkpoint was looked for")

    monkeypatch.setattr(spine, "open_run", opens)
    monkeypatch.setattr(spine, "restarted", opens)
    with open_folder(root, goes_on=True), pytest.raises(ConfigError, match="is in use"):
        spine.run(parsed(values(root, 4)))


def test_the_time_limit_counts_from_the_start_of_the_run(tmp_path: Path) -> None:
    """Opening may take minutes; a job's time has gone on meanwhile."""
    limited = opened(tmp_path, {**SHORT, "save": str(tmp_path / "run"), "exit_duration_in_mins": 1.0})
    summary = train_opened(limited, time.perf_counter() - 61)
    assert summary is not None and summary["outcome"] == "--exit-duration-in-mins 1 reached"
    assert limited.state.iteration == 1


def test_the_command_starts_the_clock_before_pytorch_is_loaded(
    redline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr("redline.run.run", lambda _, started: seen.append(started))
    before = time.perf_counter()
    code, _, err = redline(f"train {TINY}")
    assert code == 0, err
    assert before <= seen[0] <= time.perf_counter()
