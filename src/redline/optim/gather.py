"""Parameters brought back to every rank after each has updated its own part: all-gathers of buckets.

Without overlap they are all waited for after the step. With it they are sent then, those of the first layers
first, and each part of the model waits for its own buckets just before it is used in the next forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.comm import Transport, Work
from redline.optim.flat import FlatBuffers
from redline.optim.states import is_fp8


@dataclass(slots=True)
class Gathering:
    """One bucket of parameters, and its all-gather while that is on its way."""

    params: Tensor
    names: tuple[str, ...]
    work: Work | None = None

    def wait(self) -> None:
        """Return once the whole bucket may be read."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class ParamGatherer:
    """All-gathers of the parameters in `buffers` of which each rank of `shard` has updated its own part.

    Args:
        overlap: let them travel while the next forward pass runs.
    """

    def __init__(self, buffers: FlatBuffers, shard: Transport, *, overlap: bool) -> None:
        self._shard, self._overlap = shard, overlap
        self.buckets = [
            Gathering(
                _bytes_of(buffer.tensors["param"])[start:end],
                tuple(slot.name for slot in buffer.slots if start <= slot.start < end),
            )
            for buffer in buffers.buffers
            if buffer.trainable and buffers.sharding.states
            for start, end in buffer.buckets
        ]
        self.buckets.sort(key=lambda bucket: buffers.first_use(bucket.names))  # as forward reads them
        self._by_part: dict[str, list[Gathering]] = {}
        for bucket in self.buckets:
            for part in {part_of(name) for name in bucket.names}:
                self._by_part.setdefault(part, []).append(bucket)

    def start(self, *, at_once: bool = False) -> None:
        """Send every bucket, in the order of the forward pass; `at_once` waits for them in any case."""
        for bucket in self.buckets:
            bucket.work = self._shard.all_gather(bucket.params)
            if not self._overlap:
                bucket.wait()
        if at_once:
            self.finish()

    def before(self, part: str) -> None:
        """Wait for what this part of the model reads: "embedding", "layers.3", or "head" for all the rest."""
        for bucket in self._by_part.get(part, ()):
            bucket.wait()

    def finish(self) -> None:
        """Wait for everything."""
        for bucket in self.buckets:
            bucket.wait()


def _bytes_of(params: Tensor) -> Tensor:
    """What travels: parameters as they are, or, in fp8, which Gloo does not know, as bytes.

    `.data` counts its own versions: autograd must not take a part that arrives while others are in use
    already for a change of those.
    """
    return params.data.view(torch.uint8) if is_fp8(params) else params.data


def part_of(name: str) -> str:
    """The part of the model that reads a parameter first."""
    words = name.split(".")
    if words[0] == "layers":
        return ".".join(words[:2])
    return "embedding" if words[0] == "embedding" else "head"
