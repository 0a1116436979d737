"""Misspelt and retired flags: the words to write in their place, where those can only mean one thing."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from redline.config.flags import UNSET
from redline.config.launch import FlagUse
from redline.config.launch.attribute import pairs
from redline.config.launch.successors import SUCCESSORS
from redline.config.tree import spellings
from redline.doctor.finding import Mend

ALIKE = 0.88  # from which a known flag is what was meant; below it is only asked


def respelled(use: FlagUse) -> Mend:
    """The mend of a misspelt flag; an empty one where it is not clear what was meant."""
    if use.nearest is None or SequenceMatcher(None, use.flag, use.nearest).ratio() < ALIKE:
        return Mend()
    return _instead(use, [use.nearest, *(use.value or "").split()])


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
