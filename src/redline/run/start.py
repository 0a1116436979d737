"""The checkpoint that all ranks start from: the first rank finds it, the others load that very folder.

Ranks that looked for themselves could find different ones and never say so: a network disk shows each machine
its own view of `latest` for a while, and an earlier run may still be saving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redline.checkpoint import find_damage, read_manifest
from redline.comm import Group, every, from_first, together
from redline.config import CheckpointConfig, Parsed, RunConfig, check, with_values
from redline.errors import CheckpointError
from redline.run.restart import CHOSEN_FIELDS
from redline.run.resume import Start, find_start, with_checkpoint_shape
from redline.step import TrainState

Said = Callable[[str], object]


def open_start(group: Group, parsed: Parsed, say: Said) -> tuple[RunConfig, Start | None]:
    """The options and the checkpoint that this run begins with, the first rank's on every rank.

    Raises: CheckpointError on all ranks where the first finds none that it must, or another cannot see it.
    """

    def find() -> tuple[dict[str, Any], Start | None]:
        start, found = find_start(parsed.config.checkpoint)
        for line in found:
            say(line)
        return _chosen(parsed.config.checkpoint), start

    # Of the options too: what a restart loads, `restarted` decides on the first rank.
    chosen, start = from_first(group, find)
    if start is not None and group.handle is not None:
        _require_seen(group, start)

    def configured() -> RunConfig:
        config = with_values(parsed.config, chosen)
        if start is not None and config.checkpoint.use_checkpoint_args:
            config = with_checkpoint_shape(config, parsed.explicit, start)
            check(config, explicit=parsed.explicit)
        return config

    return together(group, configured), start


def require_same_step(group: Group, start: Start, state: TrainState) -> None:
    """Raise CheckpointError on all ranks unless they have come to one step: the last guard."""
    steps = every(group, lambda: state.iteration)

    def compare() -> None:
        for rank, step in enumerate(steps):
            if step != steps[0]:
                raise CheckpointError(
                    f"rank 0 is at step {steps[0]} and rank {rank} at step {step}, both from {start.folder}.",
                    why="ranks of different steps would train on with different weights.",
                    mend="keep checkpoints on a disk that all machines see, and start again.",
                )

    together(group, compare)


def _chosen(options: CheckpointConfig) -> dict[str, Any]:
    return {name: getattr(options, name) for name in CHOSEN_FIELDS}


def _require_seen(group: Group, start: Start) -> None:
    """Raise CheckpointError on all ranks unless each sees the first one's checkpoint in the same folder."""
    wanted = from_first(group, lambda: read_manifest(start.folder))

    def look() -> None:
        try:
            seen = read_manifest(start.folder)
            fault = find_damage(start.folder, seen, checksums=False)
        except CheckpointError as error:
            raise _unseen(group, start, error.what) from error
        if fault is not None:
            raise _unseen(group, start, f"{fault}.")
        if seen != wanted:
            raise _unseen(group, start, "the folder of that name there holds another checkpoint.")

    together(group, look)


def _unseen(group: Group, start: Start, why: str) -> CheckpointError:
    return CheckpointError(
        f"rank {group.index} cannot load {start.folder}, which rank 0 found.",
        why=why,
        mend="name with --load a folder on a disk that all machines see under this path; where it is one, "
        "start again: what another run has just saved may reach them late.",
    )
