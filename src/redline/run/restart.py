"""A run that torch elastic starts again goes on from its own newest checkpoint, by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from redline.checkpoint import find_latest
from redline.config import Environment, Parsed, with_values
from redline.errors import CheckpointError, ConfigError
from redline.run.folder import RunFolder, checkpoint_root

CHOSEN_FIELDS = ("load", "finetune", "pretrained_checkpoint", "ckpt_step")  # what a restart may choose


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
        own = {"load": options.save, "finetune": False, "pretrained_checkpoint": None, "ckpt_step": None}
        return replace(parsed, config=with_values(parsed.config, own if saved else {"load": options.save}))
    RunFolder(root).metrics.unlink(missing_ok=True)
    return parsed


def _holds_checkpoints(root: Path) -> bool:
    """Also where none can be used: that is told to all ranks, once they have met, when it is to be loaded."""
    try:
        return root.is_dir() and find_latest(checkpoint_root(root)).folder is not None
    except CheckpointError:
        return True
