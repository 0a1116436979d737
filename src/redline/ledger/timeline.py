"""Cuts a window of time so that each instant has exactly one owner.

A layer is a set of spans with owners; layers stand in order of precedence, and an instant belongs to the
first layer that covers it. Spans of one layer may overlap: an instant that two of them cover belongs to the
one that began first. What no layer covers stays without an owner. All times are whole nanoseconds: the parts
sum to the window exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Layer:
    """Disjoint spans, by start, and who owns each.

    Made by `layer` from spans that may overlap.
    """

    starts: Ints
    ends: Ints
    owners: Ints

    def where(self, chosen: npt.NDArray[np.bool_]) -> Layer:
        """The chosen spans alone."""
        return Layer(self.starts[chosen], self.ends[chosen], self.owners[chosen])


@dataclass(frozen=True, slots=True)
class Cut:
    """A window in pieces, in order of time, without gaps.

    Attributes:
        starts, ends: of each piece.
        layers: index of the layer that owns it, NOBODY for none.
        owners: who owns it inside that layer.
    """

    starts: Ints
    ends: Ints
    layers: Ints
    owners: Ints

    @property
    def lengths(self) -> Ints:
        """Nanoseconds of each piece."""
        return self.ends - self.starts

    def owned(self, index: int, num_owners: int) -> Ints:
        """Nanoseconds that each owner of layer `index` owns."""
        mine = self.layers == index
        return np.bincount(self.owners[mine], self.lengths[mine], num_owners).astype(np.int64)


def layer(starts: Sequence[int] | Ints, ends: Sequence[int] | Ints, owners: Sequence[int] | Ints) -> Layer:
    """A layer of spans in any order; of two that overlap, the one that began first keeps the overlap."""
    begin, end, owner = (np.asarray(each, np.int64) for each in (starts, ends, owners))
    order = np.lexsort((-end, begin))
    begin, end, owner = begin[order], end[order], owner[order]
    if len(begin):
        reached = np.concatenate(([begin[0]], np.maximum.accumulate(end)[:-1]))
        begin = np.maximum(begin, reached)
    kept = end > begin
    return Layer(begin[kept], end[kept], owner[kept])


def nested(starts: Sequence[int], ends: Sequence[int]) -> Layer:
    """A layer of spans that nest (a call stack, by start): an instant belongs to the innermost."""
    begin: list[int] = []
    end: list[int] = []
    owner: list[int] = []

    def own(index: int, since: int, until: int) -> None:
        if until > since:
            begin.append(since)
            end.append(until)
            owner.append(index)

    stack: list[int] = []
    at = 0
    for index, start in enumerate(starts):
        while stack and ends[stack[-1]] <= start:
            own(stack[-1], at, ends[stack[-1]])
            at = max(at, ends[stack.pop()])
        if stack:
            own(stack[-1], at, start)
        at = max(at, start) if stack else start
        stack.append(index)
    while stack:
        own(stack[-1], at, ends[stack[-1]])
        at = max(at, ends[stack.pop()])
    return layer(begin, end, owner)


def cut(start: int, end: int, layers: Sequence[Layer]) -> Cut:
    """The window from `start` to `end`, every instant given to the first of `layers` that covers it."""
    edges = np.unique(
        np.concatenate([[start, end], *(edge for each in layers for edge in (each.starts, each.ends))])
    )
    edges = edges[(edges >= start) & (edges <= end)].astype(np.int64)
    begins, ends = edges[:-1], edges[1:]
    which = np.full(len(begins), NOBODY, np.int64)
    owners = np.full(len(begins), NOBODY, np.int64)
    for index, each in enumerate(layers):
        if not len(each.starts):
            continue
        at = np.searchsorted(each.starts, begins, side="right") - 1
        covers = (at >= 0) & (each.ends[np.maximum(at, 0)] > begins) & (which == NOBODY)
        which[covers] = index
        owners[covers] = each.owners[at[covers]]
    return Cut(begins, ends, which, owners)


def union(starts: Sequence[int] | Ints, ends: Sequence[int] | Ints) -> Layer:
    """The instants that any of these spans covers, joined where they touch; owners are 0."""
    joined = layer(starts, ends, np.zeros(len(starts), np.int64))
    if not len(joined.starts):
        return joined
    fresh = np.concatenate(([True], joined.starts[1:] > joined.ends[:-1]))
    last = np.concatenate((fresh[1:], [True]))
    return Layer(joined.starts[fresh], joined.ends[last], joined.owners[fresh])
