"""Process groups: one process needs none, several stand where the grid says."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from redline.comm import open_groups, single_process
from redline.plan.grid import make_grid


def test_one_process_needs_no_torch_distributed() -> None:
    groups = single_process()
    assert (groups.tp.size, groups.dp.size, groups.world.handle) == (1, 1, None)
    assert not dist.is_initialized()


def stand(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    grid = make_grid(4, tp=2)
    groups = open_groups(grid.groups("tp"), grid.groups("dp"))
    assert groups.tp.index == grid.coords(rank)["tp"] and groups.dp.index == grid.coords(rank)["dp"]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=groups.dp.handle)
    assert total.item() == sum(groups.dp.ranks)
    dist.destroy_process_group()


def wait_as_long(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    grid = make_grid(4, tp=1)
    groups = open_groups(grid.groups("tp"), grid.groups("dp"), instances=2, timeout_s=77.0)
    for group in (groups.control, groups.saving, groups.dp, groups.shard, groups.replica):
        assert group.handle is not None
        backend = group.handle._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77), group
    dist.destroy_process_group()


def test_every_group_waits_as_long_as_was_asked(tmp_path: Path) -> None:
    """Not as long as PyTorch's backends do by themselves: 30 minutes on gloo, 10 on NCCL."""
    mp.spawn(wait_as_long, args=(str(tmp_path / "store"),), nprocs=4)


def test_each_rank_stands_where_the_grid_says(tmp_path: Path) -> None:
    mp.spawn(stand, args=(str(tmp_path / "store"),), nprocs=4)
