"""How flat buffers are cut into buckets, and buckets into shards: sizes alone, for trainer and formulas.

Parameters lie in the order in which backward finishes them. A bucket is closed once it holds at least the
wanted number of elements, and padded so that its shards, one a rank, are equal and begin at whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from redline.units import round_up

ALIGNMENT = 64  # elements: whole vector loads, no scalar tails
END_ALIGNMENT = 128  # of a bucket's end, as in Megatron-LM
BUSBW_ALIGNMENT = 1 << 16  # sizes that NCCL moves fastest
DEFAULT_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRule:
    """How to cut.

    Attributes:
        size: elements at which a bucket is closed; None: one bucket.
        ranks: that share each bucket, a shard each.
        busbw: pad to what NCCL moves fastest.
    """

    size: int | None = None
    ranks: int = 1
    busbw: bool = False

    @property
    def unit(self) -> int:
        """Bucket sizes are multiples of this.

        Megatron-LM pads to lcm(ranks, 128); 64 elements a rank on top make every shard begin aligned.
        """
        if self.ranks == 1:
            return ALIGNMENT
        return math.lcm(END_ALIGNMENT, ALIGNMENT * self.ranks, BUSBW_ALIGNMENT if self.busbw else 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where parameters and buckets lie in one flat buffer, in elements.

    Attributes:
        starts: of each parameter.
        buckets: (start, end) of each, end to end.
    """

    starts: tuple[int, ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.buckets[-1][1] if self.buckets else 0


def cut_buckets(sizes: Iterable[int], rule: BucketRule) -> Layout:
    """Lay out parameters of `sizes` elements, in this order; each is aligned and within one bucket."""
    starts: list[int] = []
    buckets: list[tuple[int, int]] = []
    first = end = 0
    for size in sizes:
        starts.append(end)
        end += round_up(size, ALIGNMENT)
        if rule.size is not None and end - first >= rule.size:
            end = first + round_up(end - first, rule.unit)
            buckets.append((first, end))
            first = end
    if end > first or (starts and not buckets):
        end = first + round_up(end - first, rule.unit)
        buckets.append((first, end))
    return Layout(tuple(starts), tuple(buckets))


def default_bucket_size(dp: int) -> int:
    """Megatron-LM's: 40 million elements, or a million a rank where that is more."""
    return max(DEFAULT_BUCKET, BUCKET_PER_RANK * dp)


def shard_of(bucket: tuple[int, int], ranks: int, index: int) -> tuple[int, int]:
    """(start, end) of one rank's part of a bucket."""
    start, end = bucket
    length = (end - start) // ranks
    return start + index * length, start + (index + 1) * length
