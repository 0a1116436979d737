"""Parameters: $NAME, ${NAME...} with its operators, arrays, positional ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redline.config.launch.arithmetic import ArithmeticFaultError
from redline.config.launch.bash import Source, first_byte, gaps
from redline.config.launch.shell import (
    ARGUMENT,
    COUNT,
    Notes,
    OpenError,
    Scalar,
    Shell,
    Table,
    Variable,
    Words,
    environment_text,
)
from redline.config.launch.strings import OPERATOR, begin, replace, trim, unescape_quoted
from redline.config.launch.values import (
    BREAK,
    Alt,
    Hole,
    Item,
    Items,
    Lit,
    Piece,
    Place,
    Quoted,
    Text,
    choice,
    known,
    lit,
    names_of,
    split,
    unknown,
    variants,
)

if TYPE_CHECKING:
    from tree_sitter import Node

    from redline.config.launch.expand import Expander

PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!0-])")
Part = Any  # a Node, or the (start, end) of raw text


@dataclass(frozen=True, slots=True)
class Parameters:
    """Expands the parameters in the words of an Expander."""

    words: Expander

    @property
    def source(self) -> Source:
        """The text that the words stand in."""
        return self.words.source

    @property
    def shell(self) -> Shell:
        """The shell whose parameters they are."""
        return self.words.shell

    @property
    def notes(self) -> Notes:
        """What all shells share."""
        return self.words.notes

    def parameter(self, name: str, index: str, node: Node, *, quoted: bool) -> list[Piece]:
        place = self.source.place(node)
        if name in ("@", "*") or index in ("@", "*"):
            items = self.all(name, index, place)
            if name == "*" or index == "*":
                return pieces_of(self.words.joined(items, place), quoted=quoted)
            return spread(items, quoted=quoted)
        value = self._value(name, index, place)
        if value is None:
            value = self._outside(name, place)
        return pieces_of(value, quoted=quoted)

    def all(self, name: str, index: str, place: Place) -> Items:
        if index:
            value = self.shell.get(name, place, self.notes)
            if value is None:
                return ()
            return items_of(value)
        if "@" in self.notes.pinned:
            self.notes.asked.add("@")
            return tuple(split([Lit(self.notes.pinned["@"], place)]))
        if self.shell.args is not None:
            return self.shell.args
        given: list[Item] = []
        while (name := str(len(given) + 1 + self.shell.shifted)) in self.notes.pinned:
            self.notes.asked.add(name)
            given.append(lit(self.notes.pinned[name], place))
        return tuple(given)

    def _value(self, name: str, index: str, place: Place) -> Text | None:
        """A parameter's text, None when it is unset as far as the script tells."""
        if name.isdecimal():
            return self._positional(int(name), place)
        if not name or not (name[0].isalpha() or name[0] == "_"):
            return self._special(name, place)
        if name in ("BASH_SOURCE", "FUNCNAME"):
            return self.shell.name
        return text_at(self.shell.get(name, place, self.notes), index)

    def _positional(self, number: int, place: Place) -> Text | None:
        if number == 0:
            return self.shell.name
        if self.shell.args is None:
            name = str(number + self.shell.shifted)
            self.notes.asked.add(name)
            return lit(self.notes.pinned[name], place) if name in self.notes.pinned else None
        item = self.shell.args[number - 1] if number <= len(self.shell.args) else ()
        return self.words.alt_text(item) if isinstance(item, Alt) else item

    def _special(self, name: str, place: Place) -> Text:
        if name == "#":
            count = len(self.all("@", "", place))
            return lit(str(count), place, COUNT if self.shell.args is None and not count else "")
        if name == "?":
            return lit("0", place)
        return unknown(f"${name}", place, "it differs from run to run.", harmless=True)

    def _outside(self, name: str, place: Place) -> Text:
        if name.isdecimal():
            return unknown(str(int(name) + self.shell.shifted), place, ARGUMENT)
        if name in self.notes.owned:
            return ()  # assigned in a branch that is not taken
        return environment_text(name, place)

    def braced(self, node: Node, *, quoted: bool) -> list[Piece]:
        """${...}: name, subscript, operator, operand."""
        place = self.source.place(node)
        end = (
            node.end_byte - 1
            if self.source.data[node.end_byte - 1 : node.end_byte] == b"}"
            else node.end_byte
        )
        parts: list[Part] = list(gaps(self.source, node, first_byte(self.source, node) + 2, end))
        head = parts.pop(0) if parts and isinstance(parts[0], tuple) else (end, end)
        raw = self.source.text(*head)
        prefix = raw[0] if raw[:1] in ("!", "#") and len(raw) > 1 else ""
        match = PARAMETER.match(raw, len(prefix))
        if match is None:
            return [self.words.hole("${...}", node, "this expansion is not understood.")]
        parts.insert(0, (head[0] + len(raw[: match.end()].encode()), head[1]))
        index, operand = self._subscript(parts)
        if prefix == "#":
            return pieces_of(self._length(match[1], index, place), quoted=quoted)
        if prefix == "!":
            return self._indirect(match[1], index, node, quoted=quoted)
        first = operand[0] if operand else None
        operator = OPERATOR.match(self.source.text(*first)) if isinstance(first, tuple) else None
        if operator is None or not isinstance(first, tuple):
            return self.parameter(match[1], index, node, quoted=quoted)
        operand[0] = (first[0] + len(operator[0]), first[1])
        return self._operated(match[1], index, operator[0], operand, node, quoted=quoted)

    def _subscript(self, parts: list[Part]) -> tuple[str, list[Part]]:
        """The subscript at the beginning of what follows a name, and the parts after it."""
        first = parts[0]
        raw = self.source.text(*first) if isinstance(first, tuple) else ""
        if not raw.startswith("["):
            return "", parts if raw else parts[1:]
        close = raw.find("]")
        if close >= 0:
            return self.index(raw[1:close]), [
                (first[0] + len(raw[: close + 1].encode()), first[1]),
                *parts[1:],
            ]
        following = parts[1] if len(parts) > 1 else None  # ${A[$i]}
        if following is None or isinstance(following, tuple):
            return "?", []
        inner = known(text_of(self.words.expansion(following, quoted=True))) or "?"
        rest = parts[2:]
        if rest and isinstance(rest[0], tuple):
            start, end = rest[0]
            rest[0] = (start + self.source.text(start, end).find("]") + 1, end)
        return inner, rest

    def index(self, raw: str) -> str:
        raw = raw.strip().strip("\"'")
        if raw in ("@", "*") or raw.lstrip("-").isdecimal():
            return raw
        found = self.shell.variables.get(raw)
        if isinstance(found, Scalar):
            return known(found.text) or "?"
        return raw

    def _length(self, name: str, index: str, place: Place) -> Text:
        if index in ("@", "*"):
            items = self.all(name, index, place)
            if any(isinstance(item, Alt) for item in items):
                return unknown(name, place, "the array's length differs between branches.")
            return lit(str(len(items)), place)
        value = self._value(name, index, place)
        string = known(value) if value is not None else None
        return lit(str(len(string)), place) if string is not None else unknown(name, place, "its length.")

    def _indirect(self, name: str, index: str, node: Node, *, quoted: bool) -> list[Piece]:
        place = self.source.place(node)
        value = self.shell.get(name, place, self.notes)
        if index in ("@", "*") and isinstance(value, Table):
            return spread(tuple(lit(key, place) for key in value.entries), quoted=quoted)
        target = known(text_at(value, index) or ()) if value is not None else None
        if target and PARAMETER.fullmatch(target):
            return self.parameter(target, "", node, quoted=quoted)
        return [self.words.hole(name, node, "it names another variable that cannot be known.")]

    def _operated(
        self,
        name: str,
        index: str,
        operator: str,
        operand: list[Part],
        node: Node,
        *,
        quoted: bool,
    ) -> list[Piece]:
        place = self.source.place(node)
        if operator.lstrip(":") in ("-", "=", "?", "+") and operator:
            return self._default(name, index, operator, operand, node, quoted=quoted)
        if index in ("@", "*") or name in ("@", "*"):
            items = self.all(name, index, place)
            if operator == ":":
                items = self._slice(items, operand, place, positional=name in ("@", "*"))
            return spread(items, quoted=quoted)
        value = self._value(name, index, place)
        text = self._outside(name, place) if value is None else value
        changed = self._changed(text, operator, operand, place)
        return pieces_of(changed, quoted=quoted)

    def _default(
        self,
        name: str,
        index: str,
        operator: str,
        operand: list[Part],
        node: Node,
        *,
        quoted: bool,
    ) -> list[Piece]:
        """${X:-y} and its kin; a variable that nothing sets is taken as unset."""
        place = self.source.place(node)
        if index in ("@", "*") or name in ("@", "*"):
            items = self.all(name, index, place)
            value: Text | None = self.words.joined(items, place) if items else None
        else:
            value = self._value(name, index, place)
        use = operator[-1]
        empty = value is None or (value == () and operator[0] == ":")
        if use == "+":
            return [] if empty else self._operand(operand, quoted=quoted)
        if empty and use == "?":
            return pieces_of(self._outside(name, place), quoted=quoted)
        if empty:
            pieces = self._operand(operand, quoted=quoted)
            if use in "-=" and index == "" and self._is_outer(name):
                pieces = self._marked(name, pieces, place)
            if use == "=" and not name.isdecimal():
                self.shell.set(name, Scalar(text_of(pieces)), self.notes)
            return pieces
        assert value is not None
        if index in ("@", "*") or name in ("@", "*"):
            return self.parameter(name, index, node, quoted=quoted)
        return pieces_of(self._fill(value, operator, operand), quoted=quoted)

    def _is_outer(self, name: str) -> bool:
        """Whether only the environment, or the words the script is started with, could set a parameter."""
        return self.shell.args is None if name.isdecimal() else name not in self.shell.variables

    def _marked(self, name: str, pieces: list[Piece], place: Place) -> list[Piece]:
        """A default, marked as taken: a condition on it offers the values that it could have been."""
        value = known(text_of(pieces))
        if not value:
            return pieces
        self.notes.defaults.setdefault(name, (value, place))
        marked: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Quoted) and isinstance(piece.segment, Lit):
                marked.append(Quoted(piece.segment._replace(taken=piece.segment.taken or name)))
            else:
                marked.append(piece._replace(taken=piece.taken or name) if isinstance(piece, Lit) else piece)
        return marked

    def _fill(self, value: Text, operator: str, operand: list[Part]) -> Text:
        """A text with choices of which some are empty, those replaced by the operand."""
        if operator[0] != ":" or len(value) != 1 or not isinstance(value[0], Hole):
            return value
        hole = value[0]
        if () not in hole.choices:
            return value
        default = text_of(self._operand(operand, quoted=True))
        return (choice(hole.names, hole.place, hole.why, (text or default for text in hole.choices)),)

    def _operand(self, operand: list[Part], *, quoted: bool) -> list[Piece]:
        found: list[Piece] = []
        inside = quoted
        for part in operand:
            if not isinstance(part, tuple):
                found += self.words.expansion(part, quoted=inside)
                continue
            start, end = part
            raw = self.source.text(start, end)
            place = self.source.at(start)
            run = ""
            for number, stretch in enumerate(re.split(r'(?<!\\)"', raw)):
                if number:
                    inside = not inside if not quoted else inside
                stretch = stretch if inside else stretch.replace("'", "")
                run = unescape_quoted(stretch)
                for piece in self.words.with_holes(Lit(run, place), quoted=inside):
                    is_plain = isinstance(piece, Quoted) and isinstance(piece.segment, Lit) and not inside
                    found.append(piece.segment if is_plain else piece)  # type: ignore[union-attr, arg-type]
        return found

    def _changed(self, text: Text, operator: str, operand: list[Part], place: Place) -> Text:
        """${X%y}, ${X#y}, ${X/a/b}, ${X:1:2}, ${X^^}, ${X,,} of every string that X can be."""
        argument = text_of(self._operand(operand, quoted=True))
        options, pattern = variants(text), known(argument)
        if options is None or pattern is None:
            hole_names = names_of(text) + names_of(argument)
            harmless = all(hole.harmless for hole in text if isinstance(hole, Hole)) and pattern is not None
            return (
                Hole(
                    hole_names or ("${...}",),
                    place,
                    "it is cut from text that is not known.",
                    harmless=harmless,
                ),
            )
        results: list[Text] = []
        for option in options:
            self.notes.spend(place, 1 + len(option) * (1 + len(pattern)) // 2000)
            results.append(lit(self._change(option, operator, pattern, place), place))
        if len(results) == 1:
            return results[0]
        return (choice(names_of(text), place, "it is decided by branches of the script.", results),)

    def _change(self, value: str, operator: str, pattern: str, place: Place) -> str:
        if operator in ("#", "##", "%", "%%"):
            return trim(value, operator, pattern)
        if operator in ("/", "//"):
            return replace(value, pattern, everywhere=operator == "//")
        if operator[0] in "^,":
            change = str.upper if operator[0] == "^" else str.lower
            return change(value) if len(operator) == 2 else change(value[:1]) + value[1:]
        if operator == ":":
            try:
                start, length = self._bounds(pattern, place)
            except (ArithmeticFaultError, OpenError):
                return value
            return value[begin(start, len(value)) :][: length if length is not None else len(value)]
        return value

    def _bounds(self, pattern: str, place: Place) -> tuple[int, int | None]:
        first, _, second = pattern.partition(":")
        start = self.words.calculate(first, place)
        return start, self.words.calculate(second, place) if second.strip() else None

    def _slice(self, items: Items, operand: list[Part], place: Place, *, positional: bool) -> Items:
        """${A[@]:1:2}, or ${@:2} of the arguments, of which the first is number 1."""
        pattern = known(text_of(self._operand(operand, quoted=True)))
        try:
            start, length = self._bounds(pattern or "0", place)
        except (ArithmeticFaultError, OpenError):
            return items
        if positional and start > 0:
            start -= 1
        return items[begin(start, len(items)) :][: length if length is not None else len(items)]


def pieces_of(text: Text, *, quoted: bool) -> list[Piece]:
    return [Quoted(None), *map(Quoted, text)] if quoted else list(text)


def spread(items: Items, *, quoted: bool) -> list[Piece]:
    """The words of an array, each its own."""
    found: list[Piece] = []
    for number, item in enumerate(items):
        if number:
            found.append(BREAK)
        if isinstance(item, Alt):
            found.append(item if quoted else _resplit(item))
        else:
            found += pieces_of(item, quoted=quoted)
    return found


def _resplit(alt: Alt) -> Alt:
    streams = tuple(tuple(split(spread(stream, quoted=False))) for stream in alt.streams)
    return Alt(alt.names, alt.place, alt.why, streams)


def text_of(pieces: list[Piece]) -> Text:
    """The one text of pieces that are not split."""
    found: list[Lit | Hole] = []
    for piece in pieces:
        if isinstance(piece, Quoted):
            found += [piece.segment] if piece.segment else []
        elif isinstance(piece, Lit | Hole):
            found.append(piece)
        elif isinstance(piece, Alt):
            found.append(Hole(piece.names, piece.place, piece.why))
    return tuple(found)


def items_of(value: Variable) -> Items:
    if isinstance(value, Words):
        return value.items
    if isinstance(value, Table):
        return tuple(value.entries.values())
    return (value.text,) if value.text else ()


def text_at(value: Variable | None, index: str) -> Text | None:
    """One text of a variable: an array's first, or the one at `index`."""
    if value is None:
        return None
    if isinstance(value, Scalar):
        return value.text if index in ("", "0") else None
    if isinstance(value, Table):
        return value.entries.get(index or "0")
    try:
        item = value.items[int(index or 0)]
    except (IndexError, ValueError):
        return None
    return (Hole(item.names, item.place, item.why),) if isinstance(item, Alt) else item
