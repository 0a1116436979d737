"""`--split`: which documents of a file are for training, validation and test."""

from __future__ import annotations

import itertools
import re

from redline.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """ "969, 30, 1" -> (0.969, 0.03, 0.001); missing numbers are 0.

    Raises: ConfigError unless there are one to three numbers, none negative, not all 0.
    """
    words = [word for word in re.split(r"[,/\s]+", text.strip()) if word]
    try:
        weights = [float(word) for word in words]
    except ValueError:
        weights = []
    total = sum(weights)
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or not 0 < total < float("inf"):
        raise ConfigError(
            f"--split {text!r} is not a split.",
            why="it takes one to three numbers for train, valid and test, none negative, not all 0.",
            mend="write for example --split 969,30,1.",
        )
    train, valid, test = (weight / total for weight in (*weights, 0.0, 0.0)[:3])
    return train, valid, test


def split_ranges(split: tuple[float, float, float], num_sequences: int) -> list[range]:
    """The consecutive sequences of each split; bounds are rounded half to even, as Megatron-LM does."""
    bounds = [0.0]
    for weight in split:
        bounds.append(bounds[-1] + weight)
    whole = [round(bound * num_sequences) for bound in bounds]
    return [range(start, stop) for start, stop in itertools.pairwise(whole)]
