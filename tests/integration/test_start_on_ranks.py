"""All ranks start from the one checkpoint that the first rank finds, or all say why they cannot."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.checkpoint import Found, find_latest, read_manifest
from redline.config import Environment, Parsed
from redline.errors import RedlineError
from redline.run import open_run, resume, train_opened
from redline.run import opening as opening_room
from redline.run import restart as restart_room
from redline.run import start as start_room
from redline.run.restart import restarted
from redline.step import TrainState

from .ranks import fork_ranks, on_ranks, state_of
from .tiny import opened, parsed

VALUES = {"eval_iters": 0, "save_interval": 2, "async_save": False, "train_iters": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, quick_start: None) -> Path:
    """A run of one process with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    train_opened(opened(folder / "cache", {**VALUES, "save": str(folder / "run")}), 0.0)
    return folder / "run"


def loading(folder: Path) -> Parsed:
    return parsed({**VALUES, "train_iters": 8, "load": str(folder)})


def resumed(given: Parsed, environment: Environment) -> tuple[int, dict[str, torch.Tensor]]:
    """Where the run stands once it is open, and with which weights."""
    run = open_run(given, environment, lambda _: None)
    found = run.state.iteration, state_of(run)
    run.close()
    return found


def refused(given: Callable[[Environment], Parsed]) -> list[str]:
    """What each of two ranks says as it refuses."""

    def work(environment: Environment) -> None:
        try:
            open_run(given(environment), environment, lambda _: None)
        except RedlineError as error:
            assert error.everywhere
            os.write(2, f"{error}\n".encode())
            os._exit(error.exit_code)

    codes, said = fork_ranks(2, work)
    assert codes == [1, 1], said
    return said


def test_a_stale_view_of_latest_moves_no_rank(saved: Path, tmp_path: Path) -> None:
    """As a network disk may show it: the second rank would find step 2 by itself."""
    stale = tmp_path / "stale"
    shutil.copytree(saved, stale)
    (stale / "checkpoints" / "latest").write_text("iter_0000002\n")

    def work(environment: Environment) -> tuple[int, dict[str, torch.Tensor]]:
        return resumed(loading((saved, stale)[environment.rank]), environment)

    (first, whole), (second, other) = on_ranks(2, work)
    assert (first, second) == (4, 4)
    assert all(torch.equal(whole[name], other[name]) for name in whole)


@pytest.mark.parametrize(
    ("name", "why"), [("absent", "manifest.json"), ("iter_0000002", "holds another checkpoint")]
)
def test_a_rank_that_does_not_see_the_checkpoint_is_named(saved: Path, name: str, why: str) -> None:
    """Disks of their own may hold nothing at the same path, or something else."""
    folder = saved / "checkpoints" / "iter_0000004"

    def given(environment: Environment) -> Parsed:
        if environment.rank == 1:
            start_room.read_manifest = lambda path: read_manifest(path.with_name(name))
            start_room.find_damage = lambda *_, **__: None
        return loading(saved)

    for words in refused(given):
        assert f"rank 1 cannot load {folder}, which rank 0 found" in words and why in words


def test_a_rank_that_sees_half_of_the_checkpoint_is_named(saved: Path) -> None:
    def given(environment: Environment) -> Parsed:
        if environment.rank == 1:
            start_room.find_damage = lambda folder, *_, **__: f"{folder / 'rank_00000_0.safetensors'} is cut"
        return loading(saved)

    for words in refused(given):
        assert "rank 1 cannot load" in words and "rank_00000_0.safetensors is cut" in words


def test_what_the_first_rank_cannot_find_is_told_to_all(saved: Path) -> None:
    def given(environment: Environment) -> Parsed:
        return loading((saved / "nowhere", saved)[environment.rank])

    for words in refused(given):
        assert f"--load {saved / 'nowhere'} is not a folder" in words


def test_ranks_at_different_steps_never_train(saved: Path) -> None:
    """Whatever let them come apart."""

    def given(environment: Environment) -> Parsed:
        def astray(state: TrainState, *args: Any, **kwargs: Any) -> None:
            resume.restore(state, *args, **kwargs)
            state.iteration -= environment.rank

        opening_room.restore = astray
        return loading(saved)

    for words in refused(given):
        assert "rank 0 is at step 4 and rank 1 at step 3" in words


def again(saved: Path, environment: Environment) -> tuple[Parsed, Environment]:
    """The second attempt of the run, as torch elastic starts it."""
    second = replace(environment, attempt=1)
    return restarted(parsed({**VALUES, "train_iters": 8, "save": str(saved)}), second), second


def test_a_restart_goes_on_where_the_first_rank_sees_checkpoints(saved: Path) -> None:
    def work(environment: Environment) -> int:
        if environment.rank == 1:
            restart_room.find_latest = lambda _: Found(None)
        return resumed(*again(saved, environment))[0]

    assert on_ranks(2, work) == [4, 4]


def test_a_restart_from_damage_is_refused_on_all_ranks(saved: Path, tmp_path: Path) -> None:
    """The first rank meets the others before it says so, and leaves none waiting for it."""
    broken = tmp_path / "run"
    shutil.copytree(saved, broken)
    for manifest in broken.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")

    for words in refused(lambda environment: again(broken, environment)[0]):
        assert "holds no complete checkpoint" in words


def test_only_forked_ranks_see_otherwise() -> None:
    assert start_room.read_manifest is read_manifest and restart_room.find_latest is find_latest
