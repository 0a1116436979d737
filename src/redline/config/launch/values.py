"""What a word of a shell script can be while nothing is run: text with holes.

A `Text` is a row of segments. A `Lit` is known and remembers where it stands in the script, so that a flag is
attributed to its line however far it travelled through variables. A `Hole` is what cannot be known: it names
the variables that it depends on and, where branches of the script gave different texts, holds all of them as
`choices`. A list of words (an array, the arguments of a command) is a row of items: texts, and `Alt`s where
the branches differ in whole words.

Holes nest, so their `weight` is bounded: a script that doubles its alternatives in every line soon has holes
without choices, never an exponential tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

MAX_WEIGHT = 600  # segments of all choices of one hole
MAX_CHARS = 200_000  # of one text
MAX_SEGMENTS = 4_000  # of one text
MAX_VARIANTS = 16  # texts that are tried one by one


class Place(NamedTuple):
    """A line (1-based) of a file."""

    file: Path
    line: int


class Lit(NamedTuple):
    """Known text; `taken` names the assumption that gave it ("SLURM_NNODES"), or is ""."""

    text: str
    place: Place
    taken: str = ""


@dataclass(frozen=True, slots=True)
class Hole:
    """Text that cannot be known.

    Attributes:
        names: variables (or constructs such as "$(nproc)") that decide it.
        place: where it arises.
        why: one sentence.
        choices: the texts that it can be, as far as branches of the script tell; () for anything.
        harmless: a path, host or date that no finding depends on.
        weight: number of segments in all choices, at any depth.
    """

    names: tuple[str, ...]
    place: Place
    why: str
    choices: tuple[Text, ...] = ()
    harmless: bool = False
    weight: int = 1


Segment = Lit | Hole
Text = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several rows of words, decided by `names`."""

    names: tuple[str, ...]
    place: Place
    why: str
    streams: tuple[tuple[Item, ...], ...]


Item = Text | Alt
Items = tuple[Item, ...]


def lit(text: str, place: Place, taken: str = "") -> Text:
    """A text that is known."""
    return (Lit(text, place, taken),) if text else ()


def unknown(name: str, place: Place, why: str, *, harmless: bool = False) -> Text:
    """A text of which nothing is known."""
    return (Hole((name,), place, why, harmless=harmless),)


def choice(names: Iterable[str], place: Place, why: str, choices: Iterable[Text]) -> Hole:
    """A hole with choices, each once; without them when they are too many to follow."""
    kept: dict[str, Text] = {}
    for text in choices:
        kept.setdefault(render(text), text)
    texts = tuple(kept.values())
    weight = 1 + sum(weigh(text) for text in texts)
    every = tuple(dict.fromkeys(names))
    if weight > MAX_WEIGHT:
        return Hole(every, place, why)
    return Hole(every, place, why, texts, weight=weight)


def weigh(text: Text) -> int:
    """Segments of a text, with those of its choices."""
    return sum(segment.weight if isinstance(segment, Hole) else 1 for segment in text)


def known(text: Text) -> str | None:
    """The text as a string, or None when it has a hole."""
    if any(isinstance(segment, Hole) for segment in text):
        return None
    return "".join(segment.text for segment in text if isinstance(segment, Lit))


def render(text: Text) -> str:
    """The text for people: a hole reads "$NAME"."""
    return "".join(_shown(segment) for segment in text)


def _shown(segment: Segment) -> str:
    if isinstance(segment, Lit):
        return segment.text
    name = segment.names[0]
    return name if name.startswith(("$", "`", "[")) else f"${name}"


def holes(text: Text) -> Iterator[Hole]:
    """Every hole of a text, also inside choices."""
    for segment in text:
        if isinstance(segment, Hole):
            yield segment
            for inner in segment.choices:
                yield from holes(inner)


def names_of(text: Text) -> tuple[str, ...]:
    """The names that decide a text."""
    return tuple(dict.fromkeys(name for hole in holes(text) for name in hole.names))


def variants(text: Text) -> list[str] | None:
    """Every string that the text can be, or None when they are not known or too many."""
    parts: list[list[str]] = []
    total = 1
    for segment in text:
        if isinstance(segment, Lit):
            parts.append([segment.text])
            continue
        options: list[str] = []
        for inner in segment.choices:
            found = variants(inner)
            if found is None:
                return None
            options += found
        total *= len(options)
        if not 0 < total <= MAX_VARIANTS:
            return None
        parts.append(options)
    return list(dict.fromkeys("".join(combination) for combination in product(*parts)))


def size(text: Text) -> int:
    """Characters of a text without its choices."""
    return sum(len(segment.text) for segment in text if isinstance(segment, Lit))


def bounded(text: Text, place: Place) -> Text:
    """The text, or a hole when it has grown beyond what a launch script can mean."""
    if len(text) > MAX_SEGMENTS or size(text) > MAX_CHARS:
        return unknown("$(too long)", place, "the text grows beyond what is read.")
    return text


def cut(text: Text, count: int) -> Text:
    """A text without its first `count` known characters."""
    rest: list[Segment] = []
    for segment in text:
        if isinstance(segment, Hole):
            rest.append(segment)
            continue
        kept = segment.text[count:]
        count = max(count - len(segment.text), 0)
        if kept:
            rest.append(segment._replace(text=kept))
    return tuple(rest)


def merge(texts: list[Text], names: tuple[str, ...], place: Place, why: str) -> Text:
    """One text for the several that a variable has after branches: what they share, and a hole between."""
    first = texts[0]
    strings = [known(text) for text in texts]
    if None not in strings and len(set(strings)) == 1:
        return first
    head = 0
    while all(head < len(text) and text[head] == first[head] for text in texts):
        head += 1
    tail = 0
    while all(tail < len(text) - head and text[-1 - tail] == first[-1 - tail] for text in texts):
        tail += 1
    middles = [text[head : len(text) - tail] for text in texts]
    if not any(middles):
        return first
    hole = choice(names, place, why, middles)
    return (*first[:head], hole, *first[len(first) - tail :])


def merge_items(lists: list[Items], names: tuple[str, ...], place: Place, why: str) -> Items:
    """The same for arrays, word by word."""
    first = lists[0]
    head = 0
    while all(head < len(items) and items[head] == first[head] for items in lists):
        head += 1
    tail = 0
    while all(tail < len(items) - head and items[-1 - tail] == first[-1 - tail] for items in lists):
        tail += 1
    middles = tuple(dict.fromkeys(items[head : len(items) - tail] for items in lists))
    if not any(middles):
        return first
    return (*first[:head], alternative(names, place, why, middles), *first[len(first) - tail :])


def alternative(names: tuple[str, ...], place: Place, why: str, streams: Iterable[Items]) -> Alt:
    """An Alt, its streams cut to their bound."""
    kept = tuple(streams)
    if sum(map(_weigh_items, kept)) > MAX_WEIGHT:
        kept = ((unknown(names[0] if names else "$(branches)", place, why),),)
    return Alt(names, place, why, kept)


def _weigh_items(items: Items) -> int:
    return sum(
        1 + sum(map(_weigh_items, item.streams)) if isinstance(item, Alt) else 1 + weigh(item)
        for item in items
    )


def lines_of(text: Text) -> tuple[Text, ...]:
    """The lines of a text; one that ends in a line end has no empty line behind it."""
    rows: list[Text] = []
    row: list[Segment] = []
    for segment in text:
        if isinstance(segment, Hole):
            row.append(segment)
            continue
        for number, part in enumerate(segment.text.split("\n")):
            if number:
                rows.append(tuple(row))
                row = []
            if part:
                row.append(segment._replace(text=part))
    return (*rows, tuple(row)) if row else tuple(rows)


def split(pieces: Iterable[Piece]) -> list[Item]:
    """Words of a row of pieces, as the shell splits what it expanded without quotes."""
    row = list(pieces)
    words = _Words()
    for index, piece in enumerate(row):
        if isinstance(piece, Break):
            words.flush()
        elif isinstance(piece, Alt):
            words.flush()
            words.found.append(piece)
        elif isinstance(piece, Quoted):
            words.add(piece.segment)
        elif isinstance(piece, Lit):
            words.add_split(piece)
        elif piece.choices and _stands_alone(piece, words, row[index + 1 : index + 2]):
            words.flush()
            words.add_choices(piece)
        else:
            words.add(piece)
    words.flush()
    return words.found


class Break:
    """The end of one word of "${array[@]}"."""


BREAK = Break()


class Quoted(NamedTuple):
    """A segment that is never split; None is the empty text of "" that still makes a word."""

    segment: Segment | None


Piece = Lit | Hole | Alt | Quoted | Break


class _Words:
    """The words that `split` has found, and the one it is in."""

    def __init__(self) -> None:
        self.found: list[Item] = []
        self.current: list[Segment] = []
        self.open = False

    def flush(self) -> None:
        if self.open:
            self.found.append(tuple(self.current))
        self.current, self.open = [], False

    def add(self, segment: Segment | None) -> None:
        self.open = True
        if segment is not None:
            self.current.append(segment)

    def add_split(self, piece: Lit) -> None:
        if piece.text[:1].isspace():
            self.flush()
        for number, word in enumerate(piece.text.split()):
            if number:
                self.flush()
            self.add(piece._replace(text=word))
        if piece.text[-1:].isspace():
            self.flush()

    def add_choices(self, hole: Hole) -> None:
        streams = tuple(dict.fromkeys(tuple(split(text)) for text in hole.choices))
        if any(streams):
            self.found.append(alternative(hole.names, hole.place, hole.why, streams))


def _stands_alone(hole: Hole, words: _Words, after: list[Piece]) -> bool:
    """Whether the choices of an unquoted hole are words of their own, not parts of one."""
    texts = [render(text) for text in hole.choices]
    said = [text for text in texts if text]
    starts = not words.open or (bool(said) and all(text[0].isspace() for text in said))
    follows = not after or isinstance(after[0], Break | Alt)
    if after and isinstance(after[0], Lit):
        follows = after[0].text[:1].isspace()
    ends = follows or (bool(said) and len(said) == len(texts) and all(text[-1].isspace() for text in said))
    return starts and ends
