"""The parts of flat storage as plain data: which tensors there are, and where parameters lie in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from redline.formulas.buckets import ALIGNMENT, BucketRule, shard_of
from redline.units import round_up

Kind = Literal["param", "main_param", "main_grad", "exp_avg", "exp_avg_sq", "exp_avg_top", "exp_avg_sq_top"]
Range = tuple[int, int]

MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
TOPS: dict[Kind, Kind] = {"exp_avg": "exp_avg_top", "exp_avg_sq": "exp_avg_sq_top"}  # beside codes of 8 bits


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its buffers: `start` and `shape` in elements."""

    name: str
    start: int
    shape: torch.Size

    @property
    def end(self) -> int:
        """One past the parameter's last element."""
        return self.start + self.shape.numel()

    @property
    def padded_end(self) -> int:
        """Where the next parameter may start."""
        return round_up(self.end, ALIGNMENT)

    def view(self, flat: Tensor) -> Tensor:
        """The parameter-shaped view of a flat buffer."""
        return flat[self.start : self.end].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Who holds what of each bucket.

    Attributes:
        rule: how buckets are cut; `rule.ranks` share each of them.
        index: of this rank among them.
        states: main parameters and moments exist for the own shard alone (the distributed optimizer).
    """

    rule: BucketRule = field(default_factory=BucketRule)
    index: int = 0
    states: bool = False

    def own(self, bucket: Range) -> Range:
        """This rank's part of a bucket."""
        return shard_of(bucket, self.rule.ranks, self.index)


@dataclass(frozen=True, slots=True)
class Buffer:
    """The flat tensors of one (parameter dtype, gradient dtype); frozen: param and main_param only.

    Attributes:
        slots: the parameters of the whole flat buffer.
        tensors: by kind, each of the elements in `window`; of tops one for each 64 elements.
        buckets: of the whole flat buffer.
        window: (first, last) element that the tensors hold; None: all.
        away: its main parameters and moments are in host memory, for want of room on the device.
    """

    slots: tuple[Slot, ...]
    tensors: dict[Kind, Tensor]
    buckets: tuple[Range, ...] = ()
    window: Range | None = None
    away: bool = False

    @property
    def trainable(self) -> bool:
        """Whether these parameters have gradients and moments."""
        return "main_grad" in self.tensors

    @property
    def range(self) -> Range:
        """(first, last) element that the tensors hold."""
        return self.window or (0, self.tensors["param"].numel())
