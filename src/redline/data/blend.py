"""Mixing several data sets by weight, in Megatron-LM's order.

At step i the data set with the largest w * max(i, 1) - (samples drawn from it so far) is drawn next, the
first of equals. That is a loop over all samples; here many stretches of it run side by side ("lanes") as
NumPy vectors. A lane has to know how many samples each data set gave before its start. That is guessed (each
set's share, rounded by largest remainder), and a lane whose guess differs from where its predecessor really
ended is run again from there. The greedy rule pulls different states together within a few steps, so one
repetition nearly always suffices; the result is exact in any case, since no lane is left whose start was not
confirmed by the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from redline.errors import ConfigError

# Samples built beyond a data set's share: the greedy order may draw one or two more than it.
SURPLUS = 0.005
LANE_LENGTH = 2048
MAX_LANES = 4096
MAX_DATASETS = np.iinfo(np.int16).max


def parse_blend(words: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """`prefix ...` or `weight prefix weight prefix ...` as (prefixes, weights or None).

    As in Megatron-LM, an odd count or any weight that is no number means prefixes only.

    Raises: ConfigError for a negative or non-finite weight, or when all weights are 0.
    """
    try:
        weights = [float(word) for word in words[::2]] if words and len(words) % 2 == 0 else None
    except ValueError:
        weights = None
    if weights is None:
        return list(words), None
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise ConfigError(
            f"{flag} {' '.join(words)}: these weights cannot be blended.",
            why="a weight is a finite number that is not negative, and at least one is above 0.",
            mend="correct the weights; they need not add up to 1.",
        )
    return list(words[1::2]), weights


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()  # type: ignore[no-any-return]


def samples_to_build(weight: float, size: int) -> int:
    """Samples that a data set of this (normalised) weight must hold for a blend of `size` samples."""
    return math.ceil(math.ceil(size * weight) * (1 + SURPLUS))


def blend_order(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Which data set each of `size` samples comes from, and which of its samples it is.

    Args:
        weights: normalised, all above 0.
    Returns: data set numbers int16 [size], sample numbers int64 [size].
    """
    assert 0 < len(weights) <= MAX_DATASETS
    share = np.array(weights, np.float64)[:, None]  # [datasets, 1]
    num_lanes = min(max(size // LANE_LENGTH, 1), MAX_LANES)
    length = -(-size // num_lanes)
    starts = np.arange(num_lanes, dtype=np.int64) * length
    drawn_before = _largest_remainder(share, starts)  # [datasets, lanes]
    drawn_after = np.empty_like(drawn_before)
    dataset = np.empty((length, num_lanes), np.int16)
    sample = np.empty((length, num_lanes), np.int64)
    stale = np.arange(num_lanes)
    while stale.size:
        dataset[:, stale], sample[:, stale], drawn_after[:, stale] = _run_lanes(
            share, starts[stale], drawn_before[:, stale], length
        )
        stale = 1 + np.flatnonzero((drawn_after[:, :-1] != drawn_before[:, 1:]).any(axis=0))
        drawn_before[:, stale] = drawn_after[:, stale - 1]
    return dataset.T.reshape(-1)[:size], sample.T.reshape(-1)[:size]


def _largest_remainder(share: NDArray[np.float64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole numbers near share * total that add up to total: [datasets, 1], [lanes] -> [datasets, lanes]."""
    ideal = share * totals
    counts = np.floor(ideal).astype(np.int64)
    by_remainder = np.argsort(counts - ideal, axis=0, kind="stable")
    rank = np.argsort(by_remainder, axis=0, kind="stable")
    counts += rank < totals - counts.sum(axis=0)
    return counts


def _run_lanes(
    share: NDArray[np.float64], starts: NDArray[np.int64], drawn: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int16], NDArray[np.int64], NDArray[np.int64]]:
    """The greedy loop for `length` steps from each start: data sets and samples [length, lanes], counts."""
    lanes = np.arange(len(starts))
    drawn = drawn.copy()
    dataset = np.empty((length, len(starts)), np.int16)
    sample = np.empty((length, len(starts)), np.int64)
    for step in range(length):
        deficit = share * np.maximum(starts + step, 1) - drawn
        chosen = deficit.argmax(axis=0)
        dataset[step] = chosen
        sample[step] = drawn[chosen, lanes]
        drawn[chosen, lanes] += 1
    return dataset, sample, drawn
