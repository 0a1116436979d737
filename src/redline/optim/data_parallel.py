"""What data-parallel ranks do together around an optimizer step, on flat buffers.

Every rank has seen other samples. Gradients carry their share of the mean over the whole global batch from
the loss on, so they are only summed; nothing is divided. Norm, zeros and non-finite values are taken of
each rank's own part and added up, with and without a distributed optimizer, so both clip by the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from redline.comm import Collectives, Group, Transport
from redline.optim.buffer import Buffer, Range
from redline.optim.clip import l2_norm
from redline.optim.flat import FlatBuffers
from redline.optim.gather import ParamGatherer
from redline.optim.nonfinite import count_nonfinite
from redline.optim.reduce import GradReducer
from redline.optim.shared import SharedParameters
from redline.optim.states import main_parts


class DataParallel:
    """The collectives of one optimizer.

    Args:
        buffers: cut as `buffers.sharding` says; its rule has as many ranks as `shard`.
        shard: the ranks that share each bucket.
        replica: the ranks that hold the same shard, where the states are held several times.
        overlap_reduce: reduce gradients during the last backward pass.
        overlap_gather: gather parameters during the next forward pass.

    Attributes:
        reducer: of the gradients.
        gatherer: of the parameters.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        shard: Transport | None = None,
        replica: Transport | None = None,
        *,
        overlap_reduce: bool = False,
        overlap_gather: bool = False,
    ) -> None:
        self._buffers = buffers
        self._shard = shard or Collectives(Group())
        assert self._shard.size == buffers.sharding.rule.ranks, "buckets are cut for other ranks"
        self.reducer = GradReducer(
            buffers,
            self._shard,
            replica or Collectives(Group()),
            scatter=buffers.sharding.states,
            overlap=overlap_reduce,
        )
        self.gatherer = ParamGatherer(buffers, self._shard, overlap=overlap_gather)

    def add_up(self, norm: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of all parts from that of the own part, and the sum of a count: float64 scalars."""
        if self._shard.size == 1:
            return norm, count
        both = torch.stack((norm.square(), count.to(norm)))
        self._shard.all_reduce(both).wait()
        return both[0].sqrt(), both[1]

    def own_grads(self, shared: SharedParameters) -> list[Tensor]:
        """The gradients that this rank measures: of its part of every bucket, what no tp rank has already."""
        return self._own_ranges(shared.counted_ranges)

    def own_copies(self, shared: SharedParameters) -> list[Tensor]:
        """Of its part of every bucket the gradients that another tp rank measures."""
        return self._own_ranges(shared.copy_ranges)

    def _own_ranges(self, ranges_of: Callable[[Buffer], list[Range]]) -> list[Tensor]:
        found = []
        for buffer in self._buffers.buffers:
            if buffer.trainable:
                ranges = ranges_of(buffer)
                for bucket in buffer.buckets:
                    window = self._buffers.sharding.own(bucket)
                    found += parts_within(buffer.tensors["main_grad"], 0, ranges, window)
        return found

    def nonfinite_parameters(self) -> tuple[tuple[str, ...], Tensor]:
        """All names in backward order, and bool [names]: whose gradient holds a NaN or an infinity."""
        buffers = self._buffers
        names = tuple(reversed(buffers.views("main_grad")))
        held = own_pieces(buffers)
        bad = count_nonfinite([held[name] for name in names]).to(buffers.device)
        if names:
            self._shard.all_reduce(bad).wait()
        return names, bad > 0

    def params_norm(self, shared: SharedParameters) -> Tensor:
        """The norm of the main parameters that this tp rank answers for, frozen ones too: float64 scalar."""
        device = self._buffers.device
        norm = l2_norm(self._main_parts(shared, sharded=True), device)
        if self._buffers.sharding.states:
            norm, _ = self.add_up(norm, torch.zeros_like(norm))
        rest = l2_norm(self._main_parts(shared, sharded=False), device)
        total: Tensor = torch.linalg.vector_norm(torch.stack((norm, rest)))
        return total

    def _main_parts(self, shared: SharedParameters, *, sharded: bool) -> Iterator[Tensor]:
        """Main parameters that this tp rank answers for: those in shards, or those in whole buffers."""
        for buffer in self._buffers.shards:
            if sharded == (buffer.window is not None):
                low, high = buffer.range
                for start, end in shared.counted_ranges(buffer):
                    yield from main_parts(buffer, max(start, low) - low, min(end, high) - low)


def parts_within(flat: Tensor, first: int, ranges: Sequence[Range], window: Range) -> list[Tensor]:
    """Of `flat`, whose first element is number `first`, the `ranges` as far as they lie in `window`."""
    cuts = [(max(start, window[0]), min(end, window[1])) for start, end in ranges]
    return [flat[low - first : high - first] for low, high in cuts if low < high]


def own_pieces(buffers: FlatBuffers) -> dict[str, list[Tensor]]:
    """The stretches of each parameter's gradient that lie in this rank's part of a bucket, by name."""
    found: dict[str, list[Tensor]] = {}
    for buffer in buffers.buffers:
        if not buffer.trainable:
            continue
        windows = [buffers.sharding.own(bucket) for bucket in buffer.buckets]
        for slot in buffer.slots:
            cuts = [(max(slot.start, low), min(slot.end, high)) for low, high in windows]
            grads = buffer.tensors["main_grad"]
            found[slot.name] = [grads[low:high] for low, high in cuts if low < high]
    return found
