"""A vocabulary split between ranks, which here are one process, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from redline.kernels.cross_entropy import VocabShard

# Where shards begin, as numbers that are taken modulo the columns; and which column is a shard of its own.
CUTS = st.lists(st.integers(1, 2**20), min_size=1, max_size=3)
ALONE = st.integers(0, 2**20)


def starts_of(columns: int, cuts: Sequence[int], alone: int | None = None) -> list[int]:
    """First columns of the shards; `alone` says which column has a shard to itself."""
    places = [0, *cuts] if alone is None else [0, *cuts, alone % columns, alone % columns + 1]
    return sorted({place % columns for place in places})


def in_turn(starts: Sequence[int], columns: int, run: Callable[[VocabShard], Any]) -> list[Any]:
    """What `run` gives for each shard, once every shard has been asked for its maxima and for its sums.

    Each of three rounds hands out what the shards posted in the round before: in the second the maxima are
    those of all, so what is posted for the sums is right, and in the third the sums are.
    """
    whole: dict[tuple[str, int], Tensor] = {}  # by the kind of a reduction, and how many came before it
    results = []
    for _ in range(3):
        posted: dict[tuple[str, int], list[Tensor]] = {}
        results = [
            run(VocabShard(start, stop - start, _all_reduce(whole, posted)))
            for start, stop in pairwise((*starts, columns))
        ]
        whole = {
            key: torch.stack(parts).amax(0) if key[0] == "max" else torch.stack(parts).sum(0)
            for key, parts in posted.items()
        }
    return results


def _all_reduce(
    whole: dict[tuple[str, int], Tensor], posted: dict[tuple[str, int], list[Tensor]]
) -> Callable[[Tensor, str], Tensor]:
    calls: Counter[str] = Counter()

    def all_reduce(tensor: Tensor, how: str) -> Tensor:
        key = how, calls[how]
        calls[how] += 1
        posted.setdefault(key, []).append(tensor.clone())
        return whole[key].clone() if key in whole else tensor

    return all_reduce
