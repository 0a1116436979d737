"""A run that goes back by --ckpt-step goes back once, however often torch elastic starts it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import TINY

FLAGS = "--eval-iters 0 --save-interval 2 --keep-checkpoints 9 --no-async-save"
BACK = f"{FLAGS} --load run --ckpt-step 2 --lr 1e-3 --train-iters 12"


def latest(folder: Path) -> str:
    return (folder / "checkpoints" / "latest").read_text().strip()


@pytest.fixture
def attempt(train: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """attempt(0, "--flags") -> Run of that attempt of a job."""

    def call(number: int, flags: str, job: str = "job", name: str = "run") -> Any:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        return train(name, flags)

    return call


@pytest.fixture
def old(attempt: Any) -> Any:
    """A run of six steps, with checkpoints of steps 2, 4 and 6."""
    return attempt(0, FLAGS, job="old")


def resumed_at(run: Any, step: int, folder: str = "run") -> bool:
    return f"{folder}/checkpoints/iter_{step:07d}: step {step}, " in run.output


def test_a_restart_before_the_first_step_goes_back_too(attempt: Any, old: Any) -> None:
    """The attempt before it ended at once, so that nothing has been saved: `latest` names the old branch."""
    assert latest(old.folder) == "iter_0000006"
    assert resumed_at(attempt(1, f"{BACK} --exit-interval 3"), 2)


def test_a_restart_after_a_save_goes_on_from_it(attempt: Any, old: Any) -> None:
    """Also from step 6, where the old branch's had the same name."""
    for number, (start, end) in enumerate([(2, 3), (3, 6), (6, 7)]):
        assert resumed_at(attempt(number, f"{BACK} --exit-interval {end}"), start)
        assert latest(old.folder) == f"iter_{end:07d}"


def test_a_restart_without_a_save_stays_on_the_branch(
    attempt: Any, old: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its first step and its first save: the record is cut at step 2, and so is `latest`."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("redline.run.actions.RunActions.save", killed)
        with pytest.raises(AssertionError):
            attempt(0, f"{BACK} --exit-interval 3")
    assert latest(old.folder) == "iter_0000002"
    assert resumed_at(attempt(1, f"{BACK} --exit-interval 3"), 2)


def test_another_job_goes_back_again(attempt: Any, old: Any) -> None:
    """What an earlier job of the same command left is not its own."""
    attempt(0, f"{BACK} --exit-interval 3")
    assert resumed_at(attempt(1, f"{BACK} --exit-interval 4", job="another"), 2)


def test_a_refused_start_leaves_latest_alone(old: Any, refused: Any) -> None:
    refused(f"train {TINY} {BACK} --save run --hidden-size 64", 1, "another model")
    assert latest(old.folder) == "iter_0000006"


def test_a_step_of_another_run_is_loaded_until_the_own_run_has_saved(attempt: Any, old: Any) -> None:
    flags = f"{BACK} --exit-interval"
    assert resumed_at(attempt(1, f"{flags} 3", name="new"), 2)
    assert resumed_at(attempt(2, f"{flags} 4", name="new"), 3, "new")
    assert latest(old.folder) == "iter_0000006" and not (old.folder / "went_back.json").exists()
