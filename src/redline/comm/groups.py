"""The process groups of a run, one for each axis of the rank grid, passed to whoever communicates.

An axis of size 1 has no group: its `handle` is None and nothing is ever sent, so one process needs no
initialised torch.distributed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor

from redline.comm.pace import Pace
from redline.comm.progress import Progress
from redline.units import format_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis, as one of them sees it.

    Attributes:
        ranks: global ranks, in order along the axis.
        index: this rank's place among them.
        handle: of torch.distributed; None on an axis of size 1.
        axis: what messages call it: "tp".
        progress: of this rank; learns what is sent along the axis.
    """

    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: dist.ProcessGroup | None = None
    axis: str = ""
    progress: Progress | None = field(default=None, compare=False, repr=False)

    def sends(self, what: str, tensor: Tensor | None = None) -> None:
        """Note a collective that begins, for whoever asks where this rank stands."""
        if self.progress is not None:
            of = "" if tensor is None else f" of {format_bytes(tensor.nbytes)}"
            self.progress.meets(f"{self.axis} {what}{of}".lstrip())

    @property
    def pace(self) -> Pace | None:
        """The stopwatch that waits along this axis are no work for; None where nobody asked."""
        return None if self.progress is None else self.progress.pace

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
    progress: Progress | None = None,
    timeout_s: float | None = None,
) -> Groups:
    """Make the groups of an initialised torch.distributed; every rank calls it with the same lists.

    Args:
        tp, dp: the ranks of every group along the axis, as `RankGrid.groups("tp")` gives them.
        control: the gloo group of all ranks, if it is open already.
        instances: how many groups of dp ranks hold a copy of the optimizer states.
        progress: of this rank; learns what is sent along every axis.
        timeout_s: longest wait in a collective of any of them; None: PyTorch's, another one on each backend.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    several, all_ranks = world_size > 1, tuple(range(world_size))
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    make = partial(_own_group, rank=rank, timeout=timeout, progress=progress)

    def on_cpu() -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo", timeout=timeout) if several else None

    own_dp = make(dp, name="dp")
    shard, replica = own_dp, Group((rank,))
    if instances > 1:
        shards = [part for ranks in dp for part in _parts(ranks, instances)]
        replicas = [same for ranks in dp for same in zip(*_parts(ranks, instances), strict=True)]
        shard, replica = make(shards, name="dp shard"), make(replicas, name="dp replica")
    return Groups(
        rank=rank,
        world=Group(all_ranks, rank, dist.group.WORLD if several else None),
        control=replace(control or Group(all_ranks, rank, on_cpu()), axis="control", progress=progress),
        saving=Group(all_ranks, rank, on_cpu()),
        tp=make(tp, name="tp"),
        dp=own_dp,
        shard=shard,
        replica=replica,
    )


def _parts(ranks: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """`ranks` cut into so many runs of neighbours, which are near each other in the machine."""
    size = len(ranks) // count
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _own_group(
    axis: Sequence[Sequence[int]],
    *,
    rank: int,
    name: str,
    timeout: timedelta | None,
    progress: Progress | None,
) -> Group:
    """Make all groups of an axis (a collective call) and return the one that holds `rank`.

    Args:
        name: a trace shows it at every collective, and the ledger tells the axes apart by it.
        timeout, progress: see `open_groups`.
    """
    own = Group((rank,))
    for ranks in axis:
        handle = dist.new_group(list(ranks), timeout=timeout, group_desc=name) if len(ranks) > 1 else None
        if rank in ranks:
            own = Group(tuple(ranks), tuple(ranks).index(rank), handle, name, progress)
    return own
