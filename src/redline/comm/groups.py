"""The process groups of a run, one for each axis of the rank grid, passed to whoever communicates.

An axis of size 1 has no group: its `handle` is None and nothing is ever sent, so one process needs no
initialised torch.distributed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis, as one of them sees it.

    Attributes:
        ranks: global ranks, in order along the axis.
        index: this rank's place among them.
        handle: of torch.distributed; None on an axis of size 1.
    """

    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """By which PyTorch's operators find the group."""
        assert self.handle is not None
        return self.handle.group_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Every group this rank belongs to.

    Attributes:
        rank: global rank.
        world: all ranks.
        control: all ranks on gloo, whatever the device: small objects and decisions.
        saving: the same, for the thread that writes checkpoints.
        tp: share each layer's matrices (and, with sequence parallelism, the sequence).
        dp: hold the same parameters and see different samples.
        shard: of those, the ones that share one copy of the optimizer states.
        replica: of those, the ones that hold the same part of them.
    """

    rank: int = 0
    world: Group = Group()
    control: Group = Group()
    saving: Group = Group()
    tp: Group = Group()
    dp: Group = Group()
    shard: Group = Group()
    replica: Group = Group()


def single_process() -> Groups:
    """The groups of a run on one process."""
    return Groups()


def open_groups(
    tp: Sequence[Sequence[int]],
    dp: Sequence[Sequence[int]],
    control: Group | None = None,
    *,
    instances: int = 1,
) -> Groups:
    """Make the groups of an initialised torch.distributed; every rank calls it with the same lists.

    Args:
        tp, dp: the ranks of every group along the axis, as `RankGrid.groups("tp")` gives them.
        control: the gloo group of all ranks, if it is open already.
        instances: how many groups of dp ranks hold a copy of the optimizer states.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    several, all_ranks = world_size > 1, tuple(range(world_size))
    own_dp = _own_group(dp, rank, "dp")
    shard, replica = own_dp, Group((rank,))
    if instances > 1:
        shards = [part for ranks in dp for part in _parts(ranks, instances)]
        replicas = [same for ranks in dp for same in zip(*_parts(ranks, instances), strict=True)]
        shard, replica = _own_group(shards, rank, "dp shard"), _own_group(replicas, rank, "dp replica")
    return Groups(
        rank=rank,
        world=Group(all_ranks, rank, dist.group.WORLD if several else None),
        control=control or Group(all_ranks, rank, dist.new_group(backend="gloo") if several else None),
        saving=Group(all_ranks, rank, dist.new_group(backend="gloo") if several else None),
        tp=_own_group(tp, rank, "tp"),
        dp=own_dp,
        shard=shard,
        replica=replica,
    )


def _parts(ranks: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """`ranks` cut into so many runs of neighbours, which are near each other in the machine."""
    size = len(ranks) // count
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _own_group(axis: Sequence[Sequence[int]], rank: int, name: str) -> Group:
    """Make all groups of an axis (a collective call) and return the one that holds `rank`.

    Args:
        name: a trace shows it at every collective, and the ledger tells the axes apart by it.
    """
    own = Group((rank,))
    for ranks in axis:
        handle = dist.new_group(list(ranks), group_desc=name) if len(ranks) > 1 else None
        if rank in ranks:
            own = Group(tuple(ranks), tuple(ranks).index(rank), handle)
    return own
