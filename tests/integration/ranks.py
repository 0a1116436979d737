"""Several ranks of a run, forked from this process: torch is imported once, and a rank costs 50 ms."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from redline.comm import close_world
from redline.config import Environment


def on_ranks(world_size: int, work: Callable[[Environment], Any], timeout_s: float = 120.0) -> list[Any]:
    """What `work(environment)` returns on each rank, in order; all must succeed.

    They meet through a file: rank 0 serves the store on a free port and writes its number there.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        port = _free_port()
        children = [_fork(place, rank, world_size, port, work) for rank in range(world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        said = [(place / f"error_{rank}") for rank in range(world_size)]
        errors = "\n".join(path.read_text() for path in said if path.exists())
        assert codes == [0] * world_size, f"exit codes of the ranks: {codes}\n{errors}"
        return [pickle.loads((place / str(rank)).read_bytes()) for rank in range(world_size)]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _fork(place: Path, rank: int, world_size: int, port: int, work: Callable[[Environment], Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        environment = Environment(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_addr="localhost",
            master_port=port,
            launched=True,
            omp_num_threads=1,
            cache_dir=place / "cache",
        )
        found = work(environment)
        (place / str(rank)).write_bytes(pickle.dumps(found))
        close_world()
        code = 0
    except BaseException:
        (place / f"error_{rank}").write_text(traceback.format_exc())
        sys.stderr.flush()
    os._exit(code)
