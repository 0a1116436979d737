"""Which parameters share hyperparameters, and where they lie in a flat buffer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch

from redline.optim.buffer import Slot

DECOUPLED = frozenset(("embedding.word.weight", "head.weight"))


class Group(NamedTuple):
    """Which hyperparameters a parameter follows."""

    decays: bool
    decoupled: bool


def group_of(name: str, shape: torch.Size) -> Group:
    """The hyperparameters of a parameter by its name.

    Biases and vectors (norm weights, those of q and k included) do not decay. The word embedding and the
    head may follow a learning rate of their own.
    """
    return Group(decays=len(shape) > 1 and not name.endswith(".bias"), decoupled=name in DECOUPLED)


def segments(
    slots: Iterable[Slot], window: tuple[int, int] | None = None
) -> dict[Group, list[tuple[int, int]]]:
    """Ranges [start, end) of a flat buffer by group: neighbours merged, the padding behind each included.

    Args:
        window: the part of the flat buffer to look at; ranges then count from its begin.
    """
    low, high = window or (0, sys.maxsize)
    ranges: dict[Group, list[tuple[int, int]]] = {}
    last: Group | None = None
    for slot in slots:
        first, end = max(slot.start, low), min(slot.padded_end, high)
        if slot.end == slot.start or first >= end:
            continue
        group = group_of(slot.name, slot.shape)
        found = ranges.setdefault(group, [])
        start = found.pop()[0] if group == last else first - low
        found.append((start, end - low))
        last = group
    return ranges
