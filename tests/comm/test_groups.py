"""Process groups: one process needs none, several stand where the grid says."""

from __future__ import annotations

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


def test_each_rank_stands_where_the_grid_says(tmp_path: Path) -> None:
    mp.spawn(stand, args=(str(tmp_path / "store"),), nprocs=4)
