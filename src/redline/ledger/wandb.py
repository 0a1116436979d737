"""The numbers of metrics.jsonl on Weights & Biases, through its own package, which is asked for only then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.errors import ConfigError, TrainingError


class WandbWriter:
    """Scalars of one run there.

    Args:
        project, entity, name: of the run; None for the package's own choice.
        folder: of the package's local files.
        config: the run's options, shown beside the curves.

    Raises:
        ConfigError: the package is not installed.
        TrainingError: it cannot start the run (no login, no network).
    """

    def __init__(
        self,
        project: str,
        *,
        entity: str | None,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"--wandb-project {project} needs the wandb package, which is not installed.",
                why="the numbers are sent by that package.",
                mend="pip install wandb, or leave it out: metrics.jsonl holds the same numbers.",
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=project,
                entity=entity,
                name=name,
                dir=str(folder),
                config=dict(config),
            )
        except Exception as error:  # the package has its own kinds for every refusal of its server
            raise TrainingError(
                f"--wandb-project {project}: Weights & Biases did not start: {error}.",
                why="its server or its local folder refused.",
                mend="run `wandb login`, set WANDB_MODE=offline, or leave it out.",
            ) from error

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send these values for `step`; the package does so from a process of its own."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
