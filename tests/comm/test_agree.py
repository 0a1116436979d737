"""Ranks that decide together: results, errors and numbers are the same on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from redline.comm import Group, first_then_all, from_first, gathered, largest, open_groups, together
from redline.errors import ConfigError, DataError

ALL = ((0, 1, 2),)


def decide(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    control = open_groups(((0,), (1,), (2,)), ALL).control

    assert together(control, lambda: rank * 10) == rank * 10
    assert from_first(control, lambda: f"said by {rank}") == "said by 0"
    assert largest(control, rank, -rank) == (2, 0)
    assert gathered(control, rank + 0.5) == [0.5, 1.5, 2.5]

    made = Path(folder) / "made"
    seen: list[bool] = []

    def make() -> str:
        seen.append(made.exists())
        made.touch()
        return "ready"

    assert first_then_all(control, rank == 1, make) == "ready"
    assert seen == [rank != 1], "the leader makes it once, the others find it"

    def fail() -> None:
        if rank > 0:
            raise DataError(f"rank {rank} finds no file.", mend="copy it there.")

    with pytest.raises(DataError, match="rank 1 finds no file") as raised:
        together(control, fail)
    assert raised.value.everywhere
    with pytest.raises(ConfigError, match="no 0"):
        from_first(control, lambda: (_ for _ in ()).throw(ConfigError(f"no {rank}")))
    dist.destroy_process_group()


def test_three_ranks_decide_together(tmp_path: Path) -> None:
    mp.spawn(decide, args=(str(tmp_path),), nprocs=3)


def test_one_process_decides_alone() -> None:
    alone = Group()
    assert together(alone, lambda: 1) == from_first(alone, lambda: 1) == 1
    assert first_then_all(alone, True, lambda: 2) == 2
    assert largest(alone, 3, 4) == (3, 4) and gathered(alone, 5.0) == [5.0]
