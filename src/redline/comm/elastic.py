"""`--nproc-per-node`: several processes on this machine, started and watched by torch elastic."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from redline.config import Environment
from redline.config.runtime import LAUNCHER_DIR
from redline.errors import ConfigError, RedlineError, TrainingError


def launch(words: Sequence[str], *, nproc_per_node: int, max_restarts: int) -> int:
    """Run `python -m redline WORDS` in that many processes until all of them end well.

    Each finds its place in the environment, as under torchrun. When one fails, the others are ended, and all
    are started again up to `max_restarts` times. A signal is passed on to them.

    Returns: the exit code: 0, also after a signal where all ranks ended well, else 128 and its number.
    Raises: RedlineError that names the rank that failed first; ConfigError where it could not obey.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What it logs of a failure, the error below says.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)

    with tempfile.TemporaryDirectory(prefix="redline-ranks-") as folder:
        os.environ[LAUNCHER_DIR] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc_per_node,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "redline", *words)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            tries = f" in {max_restarts + 1} attempts" if max_restarts else ""
            first = f"rank {rank} of {nproc_per_node} failed first: its process {failure.pid} ended "
            raise _failure(first, failure.exitcode, tries) from None
        except SignalException as stopped:
            ended = [_word(folder, rank).exists() for rank in range(nproc_per_node)]
            return 0 if all(ended) else 128 + signal.Signals(stopped.sigval).value
        finally:
            del os.environ[LAUNCHER_DIR]
    return 0


def _failure(first: str, code: int, tries: str) -> RedlineError:
    """What one process would have ended with: the kind of error that its exit code says."""
    kind: type[RedlineError] = TrainingError
    mend = "mend that and start again; a run with a checkpoint goes on with --load and --save."
    if code == ConfigError.exit_code:
        kind, mend = ConfigError, "mend that and start again."
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    why = "what it said stands above; the other ranks cannot go on without it and were ended."
    return kind(f"{first}{how}{tries}.", why, mend)


def ended_well(environment: Environment) -> None:
    """Leave word that this rank is done; a signal leaves the launcher no exit code."""
    if environment.launcher_dir is not None:
        _word(environment.launcher_dir, environment.rank).touch()


def _word(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"ended-{rank}"
