"""The run folder: where everything a run leaves behind lies.

config.toml        the resolved configuration, reusable as `redline train config.toml`
metrics.jsonl      one object a step
tensorboard/       the same numbers for TensorBoard
checkpoints/       iter_0000100/, ..., latest
summary.json       predicted and measured: what the run reached, and every choice with its reason
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from redline.errors import ConfigError, TrainingError
from redline.files import os_errors_as, write_text_atomic


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"


def name_run(name: str, now: datetime.datetime | None = None) -> Path:
    """runs/<name>-<time>, the folder of a run that was given no --save."""
    moment = now or datetime.datetime.now()
    return Path("runs") / f"{name}-{moment:%Y%m%d-%H%M%S}"


def checkpoint_root(path: Path) -> Path:
    """Where the checkpoints lie below what the user named: a run folder, or a folder of checkpoints."""
    nested = RunFolder(path).checkpoints
    return nested if nested.is_dir() else path


def open_folder(root: Path, *, resumes: bool) -> RunFolder:
    """Make the run folder. A folder that already holds a run is only entered to resume that run.

    Raises:
        ConfigError: `root` holds another run, or is a file.
        TrainingError: the folder cannot be made or written to.
    """
    folder = RunFolder(root)
    if folder.metrics.exists() and not resumes:
        raise ConfigError(
            f"--save {root} already holds a run.",
            why="a second run would mix its metrics and checkpoints with the first one's.",
            mend=f"resume it with `--load {root} --save {root}`, or name another folder.",
        )
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--save {root} is a file.", why="a run needs a folder.", mend="name a folder.")
    with os_errors_as(TrainingError, root, "create the run folder"):
        for path in (folder.root, folder.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        probe = root / ".writable"
        write_text_atomic(probe, "")
        probe.unlink()
    return folder
