"""Ranks that decide together: one does a thing first, and all learn of it, its result or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from redline.comm.groups import Group
from redline.errors import RedlineError

Result = TypeVar("Result")


def together(group: Group, make: Callable[[], Result]) -> Result:
    """Call `make` on every rank; where it fails on one, all raise the error of the first such rank.

    Without this, a rank that cannot go on would leave the others waiting for it.
    """
    if group.handle is None:
        return make()
    result, error = _tried(make)
    errors: list[RedlineError | None] = [None] * group.size
    group.sends("agreement")
    dist.all_gather_object(errors, error, group=group.handle)
    for found in errors:
        if found is not None:
            found.everywhere = True
            raise found
    assert result is not None
    return result[0]


def first_then_all(group: Group, leads: bool, make: Callable[[], Result]) -> Result:
    """Call `make` on the ranks that lead, then on the others: what the first make on disk, the rest find.

    Args:
        leads: whether this rank is among the first; at least one must be.
    """
    early = together(group, lambda: make() if leads else None)
    return together(group, lambda: make() if early is None else early)


def every(group: Group, make: Callable[[], Result]) -> list[Result]:
    """What `make` returns on each rank, in the order of the group; an error of one is raised on all."""
    if group.handle is None:
        return [make()]
    found: list[Result | None] = [None] * group.size
    mine = together(group, make)
    group.sends("exchange")
    dist.all_gather_object(found, mine, group=group.handle)
    return [each for each in found if each is not None]


def from_first(group: Group, make: Callable[[], Result]) -> Result:
    """What `make` returns on the first rank, on every rank; an error there is raised everywhere."""
    if group.handle is None:
        return make()
    said: list[tuple[tuple[Result] | None, RedlineError | None] | None]
    said = [_tried(make) if group.index == 0 else None]
    group.sends("broadcast")
    dist.broadcast_object_list(said, src=group.ranks[0], group=group.handle)
    assert said[0] is not None
    result, error = said[0]
    if error is not None:
        error.everywhere = True
        raise error
    assert result is not None
    return result[0]


def largest(group: Group, *numbers: int) -> tuple[int, ...]:
    """The largest of each number over the ranks, on every rank. The group is on the CPU."""
    if group.handle is None:
        return numbers
    found = torch.tensor(numbers, dtype=torch.int64)
    group.sends("all-reduce", found)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group.handle)
    return tuple(found.tolist())


def gathered(group: Group, value: float) -> list[float]:
    """One number of each rank, in the order of the group, on every rank. The group is on the CPU."""
    if group.handle is None:
        return [value]
    found = torch.zeros(group.size, dtype=torch.float64)
    found[group.index] = value
    group.sends("all-reduce", found)
    dist.all_reduce(found, group=group.handle)
    return [float(each) for each in found.tolist()]


def _tried(make: Callable[[], Result]) -> tuple[tuple[Result] | None, RedlineError | None]:
    """(result,) or the error that a user can mend; anything else is a bug and ends this process."""
    try:
        return (make(),), None
    except RedlineError as error:
        return None, error
