"""The words after the program to flags, fields and values: `attribute`.

Values that are known go into a `Layer` of the option tree, exactly as on Redline's own command line. A flag
whose value has a hole, or that stands in one branch only, is listed with the names that decide it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from redline.config.flags import MANY, UNSET, Spelling, to_flag
from redline.config.launch.launch import FlagUse
from redline.config.launch.megatron_names import LAUNCH_KEYS, NEMO_KEYS, SWITCHES, VALUED
from redline.config.launch.successors import old_spelling, rewritten
from redline.config.launch.values import Alt, Hole, Item, Items, Lit, Place, Text, cut, render, variants
from redline.config.layers import Layer
from redline.config.parse import is_flag
from redline.config.problems import Problem, nearest
from redline.config.tree import spellings

MAX_FLAGS = 2_000
# Words of NeMo's trainer.precision.
PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "32": "fp32"}
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*\.)?([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(slots=True)
class Attributed:
    """What the words say.

    Attributes:
        layer: known values, and what is wrong with them.
        uses: every flag, in order.
        doubts: flag -> holes that decide its value or whether it is there.
        taken: flag -> taken values that its value stands on.
        loose: holes in the place of flags: they may hold further ones.
    """

    layer: Layer = field(default_factory=Layer)
    uses: list[FlagUse] = field(default_factory=list)
    doubts: dict[str, list[Hole]] = field(default_factory=dict)
    taken: dict[str, list[str]] = field(default_factory=dict)
    loose: list[Hole] = field(default_factory=list)
    values: dict[str, tuple[str, str, Place]] = field(default_factory=dict)  # field -> flag, value, place

    @property
    def understood(self) -> int:
        """How many flags set a field."""
        return sum(use.state == "understood" for use in self.uses)


@dataclass(frozen=True, slots=True)
class _Typed:
    """A flag with its words, before anything is made of it."""

    flag: str
    place: Place
    values: tuple[Text, ...]
    holes: tuple[Hole, ...]  # that decide whether it is there at all
    taken: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """What makes the same flag in two branches the same."""
        return self.flag, " ".join(map(render, self.values))


def attribute(items: Items, place: Place) -> Attributed:
    """The flags that the arguments of a program are."""
    found = Attributed()
    for typed in _typed(list(items), place, (), found)[:MAX_FLAGS]:
        _record(typed, found)
    return found


def _typed(items: list[Item], place: Place, around: tuple[Hole, ...], found: Attributed) -> list[_Typed]:
    """Cut words into flags with their values."""
    typed: list[_Typed] = []
    index = 0
    while index < len(items):
        item = items[index]
        index += 1
        if isinstance(item, Alt):
            typed += _branches(item, place, around, found)
            continue
        head = item[0] if item else None
        if isinstance(head, Hole) or head is None:
            found.loose += [segment for segment in item if isinstance(segment, Hole)]
            continue
        if not is_flag(head.text):
            typed += _stray(item, head, around, found)
            continue
        flag, joined, _ = head.text.partition("=")
        values: list[Text] = [cut(item, len(flag) + 1)] if joined else []
        if not joined and len(item) > 1:  # --flag-$NAME
            flag = render(item)
        if not joined:
            index = _take(flag, items, index, values)
        typed.append(_Typed(flag, head.place, tuple(values), around, (head.taken,) if head.taken else ()))
    return typed


def _take(flag: str, items: list[Item], index: int, values: list[Text]) -> int:
    """Move the words that belong to a flag into `values`; returns where the next flag begins."""
    count = _count(flag)
    while index < len(items) and (count == MANY or len(values) < count):
        item = items[index]
        if isinstance(item, Alt):
            options = [stream[0] if stream else () for stream in item.streams]
            texts = [option for option in options if not isinstance(option, Alt)]
            single = all(len(stream) <= 1 for stream in item.streams) and len(texts) == len(options)
            if not single or any(_begins_flag(text) for text in texts):
                break
            filled = tuple(dict.fromkeys(text for text in texts if text))
            values.append((Hole(item.names, item.place, item.why, filled),))
        elif _begins_flag(item):
            break
        else:
            values.append(item)
        index += 1
    return index


def _begins_flag(text: Text) -> bool:
    return bool(text) and isinstance(text[0], Lit) and is_flag(text[0].text)


def _count(flag: str) -> int:
    """How many words a flag takes: 0 for a switch, MANY when it is not known."""
    spelling = spellings().get(flag)
    if spelling is not None:
        return 0 if spelling.constant is not UNSET else spelling.option.count
    return 0 if flag in SWITCHES else MANY


def _branches(alt: Alt, place: Place, around: tuple[Hole, ...], found: Attributed) -> list[_Typed]:
    """Flags of every branch: those in all of them alike are certain, the others are not."""
    hole = Hole(alt.names, alt.place, alt.why)
    streams = [_typed(list(stream), place, (*around, hole), found) for stream in alt.streams]
    if not streams:
        return []
    shared = set.intersection(*({typed.key for typed in stream} for stream in streams))
    merged: dict[tuple[str, str], _Typed] = {}
    for stream in streams:
        for typed in stream:
            sure = typed.key in shared
            holes = around if sure and typed.holes == (*around, hole) else typed.holes
            merged.setdefault(typed.key, _Typed(typed.flag, typed.place, typed.values, holes, typed.taken))
    return list(merged.values())


def _stray(item: Text, head: Lit, around: tuple[Hole, ...], found: Attributed) -> list[_Typed]:
    """A word that is no flag: a NeMo-style override model.x=1, else a mistake."""
    match = OVERRIDE.fullmatch(render(item))
    if match is not None:
        name = (match[1] or "") + match[2]
        value = cut(item, render(item).index("=") + 1)
        return [_Typed(name, head.place, (value,) if value else (), around)]
    if head.text not in ("--", "\\", "&"):
        what = f"the word {render(item)[:60]!r} belongs to no flag."
        found.layer.problems.append(
            Problem("stray-word", what, "Megatron stops at it.", "remove it, or quote it with its flag.")
        )
    return []


def _record(typed: _Typed, found: Attributed) -> None:
    flag = typed.flag
    value = " ".join(map(render, typed.values)) if typed.values else None
    name, spelling = _spelling(flag)
    if flag.rpartition(".")[2] == "precision" and (kind := PRECISIONS.get(value or "")):
        typed, name, spelling = replace(typed, values=()), f"--{kind}", spellings().get(f"--{kind}")
    words = rewritten(flag, value)
    if words:
        name, spelling = words[0], spellings().get(words[0])
    is_megatron = flag in SWITCHES or flag in VALUED or flag.rpartition(".")[2] in LAUNCH_KEYS
    state = "understood" if spelling else "megatron-only" if is_megatron else "unknown"
    field_name = spelling.option.field if spelling else None
    near = nearest(flag, (*spellings(), *SWITCHES, *VALUED)) if state == "unknown" else None
    file, line = typed.place
    found.uses.append(FlagUse(flag, value, file, line, field_name, state, near))  # type: ignore[arg-type]
    if problem := old_spelling(flag, value):
        found.layer.problems.append(problem)
    taken = [segment.taken for text in typed.values for segment in text if isinstance(segment, Lit)]
    found.taken.setdefault(flag, []).extend(filter(None, (*taken, *typed.taken)))
    found.doubts.setdefault(flag, []).extend((*typed.holes, *_doubts(typed, spelling)))
    if typed.holes or spelling is None:
        return
    if words:
        for part, rest in pairs(words):
            if (new := spellings().get(part)) is not None:
                _put(part, new, tuple((Lit(word, typed.place),) for word in rest), typed.place, found)
        return
    _put(name, spelling, typed.values, typed.place, found)


def _doubts(typed: _Typed, spelling: Spelling | None) -> Iterator[Hole]:
    """Holes that decide a flag's value. A name or path that is only partly open counts as known."""
    is_free = spelling is None or (spelling.option.kind is str and not spelling.option.choices)
    for text in typed.values:
        is_partly_known = is_free and any(isinstance(segment, Lit) for segment in text)
        for segment in text:
            if isinstance(segment, Hole) and not segment.harmless and not is_partly_known:
                yield segment


def pairs(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, its words) of a row of plain words."""
    starts = [index for index, word in enumerate(words) if is_flag(word)]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[start], words[start + 1 : end]


def _spelling(flag: str) -> tuple[str, Spelling | None]:
    """The spelling that a flag, or a dotted override, is."""
    if flag.startswith("-"):
        return flag, spellings().get(flag)
    key = flag.rpartition(".")[2]
    name = to_flag(NEMO_KEYS.get(key, key))
    return name, spellings().get(name)


def _put(name: str, spelling: Spelling, values: tuple[Text, ...], place: Place, found: Attributed) -> None:
    """State the value, when it is known and well formed."""
    option = spelling.option
    if spelling.constant is not UNSET:
        if not values:
            _state(name, spelling, spelling.constant, "", place, found)
        elif (word := render(values[0]).lower()) in ("true", "false") and option.kind is bool:
            value = spelling.constant if word == "true" else not spelling.constant
            _state(name, spelling, value, word, place, found)
        else:
            _complain(name, f"{name} takes no value and has {render(values[0])[:40]!r}.", option.flag, found)
        return
    words: list[str] = []
    for text in values:
        options = variants(text)
        if options is None or len(options) != 1:
            if option.kind is not str or option.choices or any(hole_has_choices(text)):
                return
            options = [render(text)]
        words += [options[0]]
    if not words or (option.count > 1 and len(words) != option.count):
        wanted = "a value" if option.count in (1, MANY) else f"{option.count} values"
        _complain(name, f"{name} needs {wanted} and has {len(words)}.", option.flag, found)
        return
    words = [word.replace("\n", " ").strip() or word for word in words]
    _state(name, spelling, option.from_words(words), " ".join(words), place, found)


def hole_has_choices(text: Text) -> Iterator[bool]:
    """Of each hole, whether the script gives it several texts."""
    return (bool(segment.choices) for segment in text if isinstance(segment, Hole))


def _complain(name: str, what: str, flag: str, found: Attributed) -> None:
    found.layer.problems.append(
        Problem("needs-value", what, "the program stops at it.", "correct the words after it.", (name, flag))
    )


def _state(name: str, spelling: Spelling, value: Any, shown: str, place: Place, found: Attributed) -> None:
    option = spelling.option
    before = found.values.get(option.field)
    if before is not None and option.field in found.layer.values:
        old = found.layer.values[option.field]
        same_flag = before[0] == name
        if same_flag and old != value and option.fault(value) == "":
            what = (
                f"{name} is given twice: {before[1]} (line {before[2].line}) and {shown} (line {place.line})."
            )
            found.layer.problems.append(
                Problem("given-twice", what, "the last one counts.", "keep one of them.", (option.flag,))
            )
    found.values[option.field] = (name, shown, place)
    found.layer.put(name, spelling, value)
