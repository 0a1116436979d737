"""Processes for the checkpoint tests: forked, so that torch is imported only once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child process and return its id; the child exits with 0 unless `work` raises."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # also where the traceback could not be written


@pytest.fixture(name="fork")
def fork_fixture() -> Callable[[Callable[[], object]], int]:
    return fork


Ranks = Callable[[int, Callable[[int, dist.ProcessGroup], object]], None]


@pytest.fixture
def on_ranks(tmp_path: Path) -> Ranks:
    """`on_ranks(world_size, work)` runs `work(rank, group)` on that many Gloo ranks; all must succeed."""
    calls = 0

    def run(world_size: int, work: Callable[[int, dist.ProcessGroup], object]) -> None:
        nonlocal calls
        calls += 1
        store = tmp_path / f"store_{calls}"

        def start(rank: int) -> None:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            work(rank, dist.new_group(backend="gloo"))
            dist.destroy_process_group()

        children = [fork(lambda rank=rank: start(rank)) for rank in range(world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * world_size, f"exit codes of the ranks: {codes}"

    return run
