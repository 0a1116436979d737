"""Which rank holds what: ranks to coordinates and back, as arithmetic that needs no processes.

Megatron's order, fastest first: tp, cp, dp, pp (or tp, cp, pp, dp). Experts are laid over the same ranks by a
grid of their own, etp, ep, expert-dp, pp: together with the first that is its "tp-cp-ep-dp-pp".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from redline.plan.rules import broken

Axis = Literal["tp", "cp", "dp", "pp"]
ExpertAxis = Literal["etp", "ep", "edp", "pp"]
Name = TypeVar("Name")

DEFAULT_ORDER: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
PP_BEFORE_DP: tuple[Axis, ...] = ("tp", "cp", "pp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """Sizes of the axes. `dp` contains `ep`: experts are spread over data-parallel ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: tuple[Axis, ...] = DEFAULT_ORDER

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def size(self, axis: Axis | ExpertAxis) -> int:
        """Ranks along one axis."""
        size: int = getattr(self, axis)
        return size

    def coords(self, rank: int) -> dict[Axis, int]:
        """Where `rank` stands on each axis."""
        assert 0 <= rank < self.world_size, rank
        return _unravel(rank, {axis: self.size(axis) for axis in self.order})

    def rank(self, coords: Mapping[Axis, int]) -> int:
        """The rank at these coordinates; an axis that is left out counts as 0."""
        rank, stride = 0, 1
        for axis in self.order:
            rank, stride = rank + coords.get(axis, 0) * stride, stride * self.size(axis)
        return rank

    def expert_coords(self, rank: int) -> dict[ExpertAxis, int]:
        """Where `rank` stands on the experts' axes."""
        names: tuple[ExpertAxis, ...] = ("etp", "ep", "edp", "pp")
        if self.order != DEFAULT_ORDER:
            names = ("etp", "ep", "pp", "edp")
        return _unravel(rank, {axis: self.size(axis) for axis in names})

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ only along `axes`, for example "tp", or "dp" and "cp" for the gradients' sum."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coords = self.coords(rank)
            found.setdefault(tuple(coords[axis] for axis in self.order if axis not in axes), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())


def make_grid(
    world_size: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    pp_before_dp: bool = False,
) -> RankGrid:
    """The grid of `world_size` ranks; data parallelism takes what the other axes leave.

    Raises: ConfigError when the ranks cannot be arranged so.
    """
    model = tp * pp * cp
    if world_size % model:
        raise broken(
            "ranks-arranged",
            f"{world_size} rank{'s' * (world_size > 1)} cannot be arranged as "
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} "
            f"x --context-parallel-size {cp}.",
            "data parallelism takes the ranks that are left, so their product must divide all ranks.",
            f"start a multiple of {model} ranks, or lower one of the three.",
        )
    expert_tp = tp if etp is None else etp
    if (world_size // pp) % (expert_tp * ep):
        raise broken(
            "experts-arranged",
            f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {expert_tp} does not divide "
            f"the {world_size // pp} ranks of a pipeline stage.",
            "the experts of a stage are laid over the stage's own ranks.",
            "choose sizes whose product divides that number.",
        )
    order = PP_BEFORE_DP if pp_before_dp else DEFAULT_ORDER
    return RankGrid(tp=tp, cp=cp, dp=world_size // model, pp=pp, ep=ep, etp=expert_tp, order=order)


def _unravel(rank: int, sizes: Mapping[Name, int]) -> dict[Name, int]:
    """Mixed-radix digits of `rank`, the first axis fastest."""
    coords = {}
    for axis, size in sizes.items():
        rank, coords[axis] = divmod(rank, size)
    assert math.prod(sizes.values()) > 0 and rank == 0
    return coords
