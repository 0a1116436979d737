"""Parameters that several tensor-parallel ranks hold: summed where each has a part, counted once in norms.

Two things differ from a run on one rank. Some gradients are partial sums: of norms and biases on part of the
sequence, of q and k norms on some heads, of keys and values where ranks share a group. They are added up, all
in one collective a step. And a norm over all ranks must count a parameter that is whole everywhere once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from redline.comm.collectives import all_reduce
from redline.comm.groups import Group
from redline.formulas.params import Shared
from redline.optim.buffer import Buffer, Kind
from redline.optim.flat import FlatBuffers


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """What the optimizer must know of the tensor-parallel axis; the default is one rank.

    Attributes:
        group: the ranks.
        shared: by parameter name; those that are not named are this rank's alone, with whole gradients.
        padding: by parameter name, elements that belong to no logical tensor (rows that pad a vocabulary).
    """

    group: Group = field(default_factory=Group)
    shared: Mapping[str, Shared] = field(default_factory=dict)
    padding: Mapping[str, int] = field(default_factory=dict)

    def sum_partial(self, buffers: FlatBuffers) -> None:
        """Add up the partial gradients over the ranks, in place: one all-reduce for each gradient dtype."""
        for buffer in buffers.buffers:
            if not buffer.trainable:
                continue
            flat, size = buffer.tensors["main_grad"], self._size(buffer)
            if not size:
                continue
            places = list(self._partial(buffer))
            total = flat.new_zeros(size)
            for start, end, place in places:
                total[place : place + end - start] = flat[start:end]
            all_reduce(total, self.group)
            for start, end, place in places:
                flat[start:end] = total[place : place + end - start]

    def counted(self, buffers: FlatBuffers, kind: Kind) -> list[Tensor]:
        """The flat ranges of `kind` for which this rank answers: together the ranks' are all, each once."""
        found = []
        for buffer in buffers.buffers:
            if kind in buffer.tensors:
                flat = buffer.tensors[kind]
                found += [flat[start:end] for start, end in self.counted_ranges(buffer)]
        return found

    def counted_ranges(self, buffer: Buffer) -> list[tuple[int, int]]:
        """The same as ranges of elements of one buffer, in order; padding, which is zero, may lie inside."""
        ranges: list[tuple[int, int]] = []
        start = 0
        for slot in buffer.slots:
            for first, last in self._copies(slot.name):
                if slot.start + first > start:
                    ranges.append((start, slot.start + first))
                start = slot.start + last
        end = buffer.slots[-1].padded_end
        return [*ranges, (start, end)] if end > start else ranges

    def copy_ranges(self, buffer: Buffer) -> list[tuple[int, int]]:
        """The rest: ranges for which another rank answers, which holds the same gradients if all is well."""
        return [
            (slot.start + first, slot.start + last)
            for slot in buffer.slots
            for first, last in self._copies(slot.name)
        ]

    def num_counted(self, buffers: FlatBuffers) -> int:
        """Gradient elements for which this rank answers, without padding."""
        views = buffers.views("main_grad")
        copies = (last - first for name in views for first, last in self._copies(name))
        padding = (self.padding.get(name, 0) for name in views)
        return sum(view.numel() for view in views.values()) - sum(copies) - sum(padding)

    def total(self, numbers: Tensor) -> Tensor:
        """Numbers of this rank's part, summed over the ranks: a new tensor."""
        return all_reduce(numbers.clone(), self.group) if self.group.size > 1 else numbers

    def norm(self, norm: Tensor) -> Tensor:
        """The norm of all ranks' parts together from that of each."""
        return self.total(norm.square()).sqrt() if self.group.size > 1 else norm

    def _copies(self, name: str) -> Sequence[tuple[int, int]]:
        return self.shared[name].copies if name in self.shared else ()

    def _size(self, buffer: Buffer) -> int:
        """Elements of the vector of all partial sums; the same on every rank."""
        return sum(self.shared[slot.name].size for slot in buffer.slots if slot.name in self.shared)

    def _partial(self, buffer: Buffer) -> list[tuple[int, int, int]]:
        """(start, end) in the buffer and the place in that vector of each partial gradient."""
        found, base = [], 0
        for slot in buffer.slots:
            if slot.name in self.shared:
                shared = self.shared[slot.name]
                found += [(slot.start + a, slot.start + b, base + at) for a, b, at in shared.partial]
                base += shared.size
        return found


def agreed(bad: Tensor, group: Group) -> Tensor:
    """bool [names]: what any rank found bad."""
    if group.size == 1:
        return bad
    return all_reduce(bad.to(torch.int32), group, "max").bool()
