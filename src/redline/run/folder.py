"""The run folder: where everything a run leaves behind lies.

config.toml        the resolved configuration, reusable as `redline train config.toml`
metrics.jsonl      one object a step
fp8.jsonl          with --fp8-stats-interval: what casts to fp8 lost, one object an operand
tensorboard/       the same numbers for TensorBoard
checkpoints/       iter_0000100/, ..., latest
went_back.json     of a run that went back by --ckpt-step: which, so that a restart does not go back again
ledger.json        where the time of the profiled steps went; their traces beside it
summary.json       predicted and measured: what the run reached, and every choice with its reason
"""

from __future__ import annotations

import datetime
import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from redline.config import CheckpointConfig
from redline.errors import ConfigError, TrainingError
from redline.files import os_errors_as, write_text_atomic
from redline.ledger import FP8_FILE, LEDGER_FILE


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
    def fp8(self) -> Path:
        return self.root / FP8_FILE

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def went_back(self) -> Path:
        return self.root / "went_back.json"

    @property
    def ledger(self) -> Path:
        return self.root / LEDGER_FILE

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"


def name_run(name: str, now: datetime.datetime | None = None) -> Path:
    """runs/<name>-<time>, the folder of a run that was given no --save; numbered if that is taken."""
    moment = now or datetime.datetime.now()
    wanted = Path("runs") / f"{name}-{moment:%Y%m%d-%H%M%S}"
    others = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], others) if not path.exists())


def checkpoint_root(path: Path) -> Path:
    """Where the checkpoints lie below what the user named: a run folder, or a folder of checkpoints."""
    nested = RunFolder(path).checkpoints
    return nested if nested.is_dir() else path


def goes_on(options: CheckpointConfig) -> bool:
    """Whether the run goes on in the folder it loads from: `--load` names `--save`, or a part of it."""
    if options.load is None or options.save is None or options.finetune:
        return False
    load, save = Path(options.load).resolve(), Path(options.save).resolve()
    return load == save or save in load.parents


def check_folder(root: Path, *, goes_on: bool) -> None:
    """Raise ConfigError unless a run may write into `root`: a new one never into another's folder.

    A start that failed before its first step leaves no record, and its folder can be used again.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--save {root} is a file.", why="a run needs a folder.", mend="name a folder.")
    if goes_on:
        return
    folder = RunFolder(root)
    if (folder.metrics.exists() and folder.metrics.stat().st_size) or any(folder.checkpoints.glob("iter_*")):
        raise ConfigError(
            f"--save {root} already holds a run.",
            why="a second run would mix its metrics and checkpoints with the first one's.",
            mend=f"resume it with `--load {root} --save {root}`, or name another folder.",
        )
    foreign = [path.name for path in (folder.config, folder.summary) if path.exists()]
    if foreign and not folder.metrics.exists():
        raise ConfigError(
            f"--save {root} holds a {foreign[0]} that is not of a run.",
            why="the run's own would replace it.",
            mend="name another folder; a new one is made.",
        )


def check_unused(root: Path) -> None:
    """Raise ConfigError while a run is going on in `root`: what it holds is not yet what it will leave."""
    if root.is_dir():
        with _held(root):
            pass


@contextmanager
def open_folder(root: Path, *, goes_on: bool) -> Iterator[RunFolder]:
    """Make the run folder, and keep every other run out of it as long as this one lasts.

    Args:
        goes_on: enter a folder that already holds a run, to continue it.

    Raises:
        ConfigError: `root` may not be used (see `check_folder`), or a run is going on there.
        TrainingError: it cannot be made or written to.
    """
    check_folder(root, goes_on=goes_on)
    folder = RunFolder(root)
    with os_errors_as(TrainingError, root, "create the run folder"):
        for path in (folder.root, folder.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        probe = root / ".writable"
        write_text_atomic(probe, "")
        probe.unlink()
    with _held(root):
        check_folder(root, goes_on=goes_on)  # again: a run may have ended there since
        if not goes_on:
            folder.metrics.unlink(missing_ok=True)  # it holds no record
        yield folder


@contextmanager
def _held(root: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases however the process ends."""
    with os_errors_as(TrainingError, root, "open the run folder"):
        handle = os.open(root, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems of several machines have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--save {root} is in use.",
                    why="a run is going on there, and two would overwrite each other's checkpoints.",
                    mend="wait for it or end it, or name another folder.",
                ) from None
        yield
    finally:
        os.close(handle)
