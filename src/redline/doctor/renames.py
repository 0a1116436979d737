"""Misspelt and retired flags: the words to write in their place, where those can only mean one thing."""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from redline.config.flags import UNSET
from redline.config.launch import FlagUse, Launch
from redline.config.launch.attribute import pairs
from redline.config.launch.successors import SUCCESSORS
from redline.config.tree import spellings, with_values
from redline.doctor.finding import Mend

ALIKE = 0.88  # from which a known flag is what was meant; below it is only asked


def respelled(use: FlagUse) -> Mend:
    """The mend of a misspelt flag; an empty one where it is not clear what was meant."""
    if use.nearest is None or SequenceMatcher(None, use.flag, use.nearest).ratio() < ALIKE:
        return Mend()
    if (old := SUCCESSORS.get(use.nearest)) is not None:  # a misspelt flag of earlier years
        return _instead(use, old.mend.format(use.value or "").split())
    return _instead(use, [use.nearest, *(use.value or "").split()])


def as_meant(launch: Launch) -> Launch:
    """The launch with its clearly misspelt and cut-off flags as they are meant, to judge the rest by."""
    values: dict[str, Any] = {}
    for use in launch.cut_off:
        if "$" not in (use.value or ""):
            values |= meaning([use.flag, *(use.value or "").split()]) or {}
    for use in launch.flags:
        if use.state == "unknown" and use.flag not in SUCCESSORS:
            values |= respelled(use).values
    values = {name: value for name, value in values.items() if name not in launch.stated}
    if not values:
        return launch
    return replace(
        launch, config=with_values(launch.config, values), stated=launch.stated | frozenset(values)
    )


def succeeded(use: FlagUse) -> Mend:
    """The mend of a retired flag; an empty one where its successor is a choice."""
    successor = SUCCESSORS[use.flag]
    words = successor.mend.format(use.value or "").split()
    if not words:
        return Mend(drop=(use.flag,))
    return _instead(use, words)


def _instead(use: FlagUse, words: list[str]) -> Mend:
    """These words in place of a flag and its value, where all of them are known and well formed."""
    values = None if "$" in (use.value or "") else meaning(words)
    return Mend() if values is None else Mend(values=values, rename={use.flag: " ".join(words)})


def meaning(words: list[str]) -> dict[str, Any] | None:
    """The options that these words set; None unless every one is a known flag with a well-formed value."""
    values: dict[str, Any] = {}
    if not words or not words[0].startswith("--"):
        return None
    for flag, rest in pairs(words):
        spelling = spellings().get(flag)
        if spelling is None:
            return None
        option = spelling.option
        if spelling.constant is not UNSET:
            if rest:
                return None
            values[option.field] = spelling.constant
            continue
        if len(rest) != option.count:
            return None
        value = option.from_words(rest)
        if option.fault(value):
            return None
        values[option.field] = value
    return values
