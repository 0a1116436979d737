"""A run that torch elastic starts again goes on from its own newest checkpoint, by itself.

One that was told to go back, by --ckpt-step in its own folder, goes back once: `latest` follows after its
first step, and a note beside it tells the next attempt so. `latest` alone could not: an attempt that ended
before its first step leaves it on the branch that was to be left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from redline.checkpoint import LATEST, find_latest, folder_name
from redline.config import CheckpointConfig, Environment, Parsed, with_values
from redline.errors import CheckpointError, ConfigError
from redline.files import os_errors_as, write_json_atomic, write_text_atomic
from redline.run.folder import RunFolder, checkpoint_root, goes_on

CHOSEN_FIELDS = ("load", "finetune", "pretrained_checkpoint", "ckpt_step")  # what a restart may choose


@dataclass(slots=True)
class Rollback:
    """A run that leaves the steps behind `step` for others, in its own folder.

    Attributes:
        folder: of the run.
        job: the name that attempts of one job share; "" without torch elastic.
        pending: whether this attempt has taken no step yet.
    """

    folder: RunFolder
    step: int
    job: str
    pending: bool = True

    def settle(self) -> None:
        """Let `latest` name the checkpoint gone back to; to be called after each step, acts after the first.

        The note comes second: cut between the two, the next attempt goes back again, and nothing is lost.

        Raises: CheckpointError when the folder cannot be written.
        """
        if not self.pending:
            return
        self.pending = False
        latest = self.folder.checkpoints / LATEST
        with os_errors_as(CheckpointError, latest, "write"):
            write_text_atomic(latest, folder_name(self.step) + "\n")
        with os_errors_as(CheckpointError, self.folder.went_back, "write"):
            write_json_atomic(self.folder.went_back, self._note())

    def settled(self) -> bool:
        """Whether an earlier attempt of this job has gone back already. Raises: CheckpointError."""
        if not self.folder.went_back.exists():
            return False
        with os_errors_as(CheckpointError, self.folder.went_back, "read"):
            text = self.folder.went_back.read_text(errors="replace")
        return text.strip() == json.dumps(self._note(), indent=2)

    def _note(self) -> dict[str, str | int]:
        return {"job": self.job, "step": self.step}


def rollback_of(options: CheckpointConfig, environment: Environment) -> Rollback | None:
    """The step that a run goes back to in its own folder; None where it loads the latest, or another's."""
    if options.ckpt_step is None or options.load is None or options.save is None or not goes_on(options):
        return None
    folder = RunFolder(Path(options.save))
    if checkpoint_root(Path(options.load)).resolve() != folder.checkpoints.resolve():
        return None
    return Rollback(folder, options.ckpt_step, environment.elastic_job)


def restarted(parsed: Parsed, environment: Environment) -> Parsed:
    """The options of this attempt: those given, and from the second attempt on `--load` of the run itself.

    The first rank alone looks at the disk, and the others learn its choice in `open_start`. Where the earlier
    attempt left no checkpoint the run begins as it began first, with a new record.

    Raises: ConfigError when the run was given no folder, so that nobody knows what it left behind.
    """
    options = parsed.config.checkpoint
    if environment.attempt == 0:
        return parsed
    if options.save is None:
        raise ConfigError(
            f"attempt {environment.attempt + 1} of this run cannot go on from the one before.",
            why="without --save each attempt has a folder of its own.",
            mend="name a folder with --save.",
        )
    if environment.rank != 0:
        return parsed
    root = Path(options.save)
    saved = _holds_checkpoints(root)
    if saved or options.load in (None, options.save):
        rollback = rollback_of(options, environment)
        step = options.ckpt_step if rollback is not None and not rollback.settled() else None
        own = {"load": options.save, "finetune": False, "pretrained_checkpoint": None, "ckpt_step": step}
        return replace(parsed, config=with_values(parsed.config, own if saved else {"load": options.save}))
    RunFolder(root).metrics.unlink(missing_ok=True)
    return parsed


def _holds_checkpoints(root: Path) -> bool:
    """Also where none can be used: that is told to all ranks, once they have met, when it is to be loaded."""
    try:
        return root.is_dir() and find_latest(checkpoint_root(root)).folder is not None
    except CheckpointError:
        return True
