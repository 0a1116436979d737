"""What Redline needs around torch.distributed.checkpoint's `save` and `load`: silence and plain errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from redline.errors import RedlineError


@contextmanager
def one_process_is_fine() -> Iterator[None]:
    """Hide DCP's warning that no process group was given: on one process that is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what failed on the first failing rank instead of DCP's report of tracebacks by rank.

    DCP gives that report to every rank, so all of them raise the same error.
    """
    try:
        yield
    except CheckpointException as report:
        causes = [cause for _, (cause, _) in sorted(report.failures.items())]
        raise next((c for c in causes if isinstance(c, RedlineError)), causes[0]) from None
