"""The record that PyTorch keeps of the newest collectives of this process, written where a job breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from redline.errors import TrainingError
from redline.files import os_errors_as, write_atomic


def write_flight_record(prefix: str, rank: int, backend: str) -> Path:
    """Write `prefix` + rank: what `torchfrtrace` reads to find the collective at which ranks part.

    Args:
        backend: of the collectives, "nccl" or "gloo".

    Raises: TrainingError where it cannot be written.
    """
    name = "_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace"
    dump: Any = getattr(c10d, name)
    path = Path(f"{prefix}{rank}")
    with os_errors_as(TrainingError, path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda handle: handle.write(dump(includeStackTraces=False)))
    return path
