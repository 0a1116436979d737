"""A run that torch elastic starts again goes on from its own newest checkpoint, by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from redline.checkpoint import find_latest
from redline.config import Environment, Parsed, with_values
from redline.errors import ConfigError
from redline.run.folder import RunFolder, checkpoint_root


def restarted(parsed: Parsed, environment: Environment) -> Parsed:
    """The options of this attempt: those given, and from the second attempt on `--load` of the run itself.

    Where the earlier attempt left no checkpoint the run begins as it began first, with a new record.

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
    root = Path(options.save)
    saved = root.is_dir() and find_latest(checkpoint_root(root)).folder is not None
    if saved or options.load in (None, options.save):
        own = {"load": options.save, "finetune": False, "pretrained_checkpoint": None, "ckpt_step": None}
        return replace(parsed, config=with_values(parsed.config, own if saved else {"load": options.save}))
    if environment.rank == 0:
        RunFolder(root).metrics.unlink(missing_ok=True)
    return parsed
