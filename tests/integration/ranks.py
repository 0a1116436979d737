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
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from redline.comm import close_world
from redline.comm.chunked import Chunked
from redline.config import Environment
from redline.run import OpenRun

PORT_BYTES = 2


def on_ranks(world_size: int, work: Callable[[Environment], Any]) -> list[Any]:
    """What `work(environment)` returns on each rank, in order; all must succeed.

    They meet at a store that this process serves, as torch elastic's agent does; they may meet anew there any
    number of times, as attempts of different numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        codes, said = _run_ranks(place, world_size, work)
        errors = "\n".join(said)
        assert codes == [0] * world_size, f"exit codes of the ranks: {codes}\n{errors}"
        return [pickle.loads((place / str(rank)).read_bytes()) for rank in range(world_size)]


def fork_ranks(world_size: int, work: Callable[[Environment], Any]) -> tuple[list[int], list[str]]:
    """Exit code of each rank and what it wrote to stderr, however they end."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_ranks(Path(folder), world_size, work)


def _run_ranks(
    place: Path, world_size: int, work: Callable[[Environment], Any]
) -> tuple[list[int], list[str]]:
    # The store is opened after the forks: its thread looks names up under a lock of the C library's, which a
    # process forked at that moment would inherit locked, and wait for without end.
    port, tell = os.pipe()
    children = [_fork(place, rank, world_size, port, work) for rank in range(world_size)]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(tell, store.port.to_bytes(PORT_BYTES, "little") * world_size)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.close(port)
    os.close(tell)
    return codes, [(place / f"error_{rank}").read_text() for rank in range(world_size)]


def state_of(run: OpenRun) -> dict[str, Tensor]:
    """Every saved tensor, whole: what other ranks hold is NaN."""
    found = {}
    for name, held in run.state.tensors().items():
        if isinstance(held, Chunked):
            whole = torch.full(tuple(held.size()), torch.nan, dtype=held.dtype)
            for offset, piece in held.pieces.items():
                whole[tuple(slice(a, a + n) for a, n in zip(offset, piece.shape, strict=True))] = piece
            held = whole
        found[name] = held.detach().clone()
    return found


def merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state that ranks hold together; what several hold must be the same bits."""
    whole = {name: tensor.clone() for name, tensor in parts[0].items()}
    for part in parts[1:]:
        for name, tensor in part.items():
            both = ~tensor.isnan() & ~whole[name].isnan()
            assert torch.equal(tensor[both], whole[name][both]), name
            whole[name] = torch.where(whole[name].isnan(), tensor, whole[name])
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def _fork(place: Path, rank: int, world_size: int, port: int, work: Callable[[Environment], Any]) -> int:
    said = os.open(place / f"error_{rank}", os.O_WRONLY | os.O_CREAT)
    child = os.fork()
    if child:
        os.close(said)
        return child
    code = 1
    try:
        os.dup2(said, 2)
        torch.set_num_threads(1)
        # A pool of compilers cannot be forked: the thread that watches it stays in the process forked from.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        if inductor := sys.modules.get("torch._inductor.config"):
            inductor.compile_threads = 1
        environment = Environment(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_addr="localhost",
            master_port=int.from_bytes(os.read(port, PORT_BYTES), "little"),
            launched=True,
            agent_store=True,
            omp_num_threads=1,
            cache_dir=place / "cache",
        )
        found = work(environment)
        (place / str(rank)).write_bytes(pickle.dumps(found))
        close_world()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)  # whatever else went wrong: a rank that returned would run this process's tests again
