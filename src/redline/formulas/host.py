"""What a rank takes of its host's memory beside the device's, by what it is.

Optimizer states and activations that are kept there (state.py, memory.py), and the snapshot from which an
asynchronous save writes. Not counted: the page cache of data files, which the kernel takes back, microbatches
that are made ahead (28 bytes a token), and the process itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from redline.formulas.params import logical_tensors, rank_slice
from redline.formulas.shape import ModelShape, TpRank
from redline.formulas.state import ITEM_BYTES, SHARDED, StateDtypes

ACTIVATIONS, ROUNDING, SNAPSHOT = "activations", "pinned_rounding", "snapshot"
STATES = SHARDED  # those that can be kept there


def pinned_rounding(sizes: Iterable[int]) -> int:
    """Bytes beside buffers of these sizes: PyTorch's allocator of pinned memory takes powers of two."""
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if size)


def snapshot_bytes(elements: int, dtypes: StateDtypes) -> int:
    """A rank's part of a checkpoint of `elements` stored ones, and what is joined or decoded for it first."""
    if not dtypes.snapshot_ranks:
        return 0
    moments = (dtypes.exp_avg, dtypes.exp_avg_sq) if dtypes.snapshot_moments else ()
    coded = sum(dtype == "fp8" for dtype in moments) * ITEM_BYTES["bf16"]  # as they are written
    joined = ITEM_BYTES[dtypes.main] * dtypes.remainder + coded
    whole = ITEM_BYTES[dtypes.main] + coded + sum(ITEM_BYTES[each] for each in moments if each != "fp8")
    own = -(-elements // dtypes.shards)
    return whole * -(-elements // dtypes.snapshot_ranks) + joined * own


@lru_cache(maxsize=64)
def snapshot_rounding(shape: ModelShape, tp: int, dtypes: StateDtypes) -> int:
    """`pinned_rounding` of the snapshot's buffers, one for each tensor of a state, or a rank's part of one.

    Only what is copied from a GPU goes to pinned memory: what is joined or decoded for it, or kept in host
    memory anyhow, is there before. A shard is taken for an equal part of each tensor.
    """
    if not dtypes.snapshot_ranks:
        return 0
    moments = (dtypes.exp_avg, dtypes.exp_avg_sq) if dtypes.snapshot_moments else ()
    items = [ITEM_BYTES[dtypes.main]] * (not dtypes.remainder)
    items += [ITEM_BYTES[each] for each in moments if each != "fp8"]
    held = [rank_slice(tensor, shape, TpRank(tp)).numel for tensor in logical_tensors(shape)]
    parts = [-(-numel // dtypes.shards) for numel in held]
    rounding = sum(pinned_rounding(item * part for part in parts) for item in items)
    return round(rounding * dtypes.shards / dtypes.snapshot_ranks * (1 - dtypes.away))
