"""`--nproc-per-node`: several processes on this machine, started and watched by torch elastic."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence

from redline.errors import ConfigError, TrainingError


def launch(words: Sequence[str], *, nproc_per_node: int, max_restarts: int) -> None:
    """Run `python -m redline WORDS` in that many processes until all of them end well.

    Each finds its place in the environment, as under torchrun. When one fails, the others are ended, and all
    are started again up to `max_restarts` times.

    Raises: TrainingError that names the rank that failed first.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What it logs of a failure, the error below says.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc_per_node,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "redline", *words)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        how = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with code {failure.exitcode}"
        tries = f" in {max_restarts + 1} attempts" if max_restarts else ""
        raise TrainingError(
            f"rank {rank} of {nproc_per_node} failed first: its process {failure.pid} ended {how}{tries}.",
            why="what it said stands above; the other ranks cannot go on without it and were ended.",
            mend="mend that and start again."
            if failure.exitcode == ConfigError.exit_code
            else "mend that, then resume with --load and --save of the run folder.",
        ) from None
