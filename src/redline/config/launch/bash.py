"""Bash text to a syntax tree, by tree-sitter. Nothing here runs or expands anything.

A `Source` is a script, or a text that the script itself hands to a shell (`eval "$CMD"`, `bash -c "..."`,
`sbatch <<EOF`). Such a text is made of pieces from many lines and may have holes: holes travel through the
parser as characters of a private Unicode range, and `marks` says which line each byte came from.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from redline.config.launch.values import Hole, Lit, Place, Text
from redline.errors import DataError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MAX_BYTES = 512 * 1024  # the longest launch script that is read; public ones stay below 60 KiB
PRIVATE = 0xF0000  # first character that stands for a hole (a plane that no script uses)
MAX_HOLES = 0xFFFD
MENDS = 4  # rounds of parsing again
NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
WIDE = re.compile(rb"[\xc4-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
# By length in UTF-8: characters below U+0100 that are neither blank nor part of a name.
STAND_INS = {2: b"\xc2\xa1", 3: b"\xc2\xa1%", 4: b"\xc2\xa1\xc2\xa1"}

EXPANSIONS = frozenset({"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"})
QUOTED = frozenset({"raw_string", "ansi_c_string"})


class Source:
    """Text that is parsed as bash.

    Attributes:
        file: the file that its lines belong to.
        data: UTF-8.
        marks: (byte offset, place) in rising order; empty when line n is line n of `file`.
        holes: what each private character stands for.
    """

    __slots__ = ("_starts", "data", "file", "holes", "marks")

    def __init__(
        self,
        file: Path,
        data: bytes,
        marks: tuple[tuple[int, Place], ...] = (),
        holes: Mapping[str, Hole] | None = None,
    ) -> None:
        self.file, self.marks, self.holes = file, marks, holes or {}
        self._take(data)

    def _take(self, data: bytes) -> None:
        self.data = data
        self._starts = [0]  # of each line
        at = data.find(b"\n")
        while at >= 0:
            self._starts.append(at + 1)
            at = data.find(b"\n", at + 1)

    def place(self, node: Node) -> Place:
        """Where a node begins."""
        return self.at(node.start_byte)

    def at(self, offset: int) -> Place:
        """The place of a byte."""
        if not self.marks:
            return Place(self.file, bisect_right(self._starts, offset))
        index = bisect_right(self.marks, offset, key=lambda mark: mark[0]) - 1
        return self.marks[max(index, 0)][1]

    def text(self, start: int, end: int) -> str:
        """The characters between two bytes."""
        return self.data[start:end].decode("utf-8", "replace")

    def parse(self) -> Node:
        """The root of the syntax tree.

        The grammar loses the "$" of $B in a=$A/x/$B/$C; there it is written ${B}, and parsed again.
        """
        root = _tree(self.data)
        for _ in range(MENDS):
            lost = _lost_dollars(root, self.data)
            if not lost:
                break
            self._brace(lost)
            root = _tree(self.data)
        return root

    def _brace(self, offsets: list[int]) -> None:
        """Put the names after these dollars in braces; lines stay as they are."""
        data = bytearray()
        marks = list(self.marks)
        at = grown = index = 0
        for offset in offsets:
            match = NAME.match(self.data, offset + 1)
            assert match is not None
            data += self.data[at : offset + 1] + b"{" + match[0] + b"}"
            while index < len(marks) and marks[index][0] <= offset:
                marks[index] = (marks[index][0] + grown, marks[index][1])
                index += 1
            at, grown = match.end(), grown + 2
        self.marks = (*marks[:index], *((start + grown, place) for start, place in marks[index:]))
        self._take(bytes(data + self.data[at:]))


def source_of_file(path: Path) -> tuple[Source, str]:
    """A script on disk, and its text exactly as it stands there.

    Raises: DataError when it cannot be read, is no text, or is too long to be a launch script.
    """
    data = read_bytes(path)
    if b"\0" in data:
        raise DataError(
            f"{path} is not a text file.",
            "it holds a NUL byte, as programs and data files do.",
            "name the launch script, a TOML or YAML config, or a run's folder.",
        )
    text = data.decode("utf-8", "surrogateescape")
    # To bash a CR is a character like others: a backslash before it quotes it, and the line ends.
    data = data.replace(b"\\\r\n", b"\\ \n").replace(b"\r\n", b"\n")
    return Source(path, data), text


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file of at most MAX_BYTES.

    Raises: DataError.
    """
    mend = "name the launch script, a TOML or YAML config, or a run's folder."
    try:
        if not path.is_file():
            why = "it is no regular file." if path.exists() else "there is no such file."
            raise DataError(f"cannot read {path}.", why, mend)
        length = path.stat().st_size
        if length > MAX_BYTES:
            raise DataError(
                f"{path} has {length:,} bytes.", f"launch scripts are read up to {MAX_BYTES:,}.", mend
            )
        return path.read_bytes()
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = getattr(exc, "strerror", None) or str(exc)
        raise DataError(f"cannot read {path}.", f"{reason}.", mend) from exc


def source_of_text(text: Text, file: Path) -> Source:
    """The source that a text of the script makes when the script hands it to a shell."""
    data = bytearray()
    marks: list[tuple[int, Place]] = []
    table: dict[str, Hole] = {}
    for segment in text:
        if isinstance(segment, Hole):
            if len(table) == MAX_HOLES:
                continue
            stand_in = chr(PRIVATE + len(table))
            table[stand_in] = segment
            marks.append((len(data), segment.place))
            data += stand_in.encode()
            continue
        lines = segment.text.split("\n")
        for number, line in enumerate(lines):
            marks.append((len(data), segment.place))
            data += line.encode("utf-8", "replace") + (b"\n" if number < len(lines) - 1 else b"")
    return Source(file, bytes(data[:MAX_BYTES]), tuple(marks) or ((0, Place(file, 1)),), table)


@cache
def _parser() -> Parser:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as exc:
        raise DataError(
            f"bash scripts need the package {exc.name}.",
            "scripts are parsed, never run.",
            "install it: pip install 'redline[doctor]'.",
        ) from exc
    return Parser(Language(tree_sitter_bash.language()))


def _tree(data: bytes) -> Node:
    """The root of the syntax tree, whose offsets hold for `data`.

    The grammar's scanner asks C's isdigit and isalpha about characters of any size, which reads far outside
    their tables and can end the process. It is shown others of the same length instead.
    """
    return _parser().parse(WIDE.sub(lambda found: STAND_INS[len(found[0])], data)).root_node


def _lost_dollars(root: Node, data: bytes) -> list[int]:
    """Where a "$" before a name is no part of an expansion, in rising order."""
    found = []
    stack = [root]
    while stack:
        node = stack.pop()
        for child in node.children:
            if child.type == "$" and node.type != "simple_expansion" and NAME.match(data, child.end_byte):
                found.append(child.start_byte)
            elif child.child_count:
                stack.append(child)
    return sorted(found)


def gaps(source: Source, node: Node, start: int, end: int) -> Iterator[Node | tuple[int, int]]:
    """The outermost expansions of a node between two bytes, and the raw stretches between them."""
    at = start
    for inner in _expansions(node, start, end):
        begins = first_byte(source, inner)
        if begins > at:
            yield at, begins
        yield inner
        at = inner.end_byte
    if at < end:
        yield at, end


def first_byte(source: Source, node: Node) -> int:
    """Where an expansion begins: in strings the parser counts blanks and line ends before it as its own."""
    at = node.start_byte
    while at < node.end_byte and source.data[at] not in b"$`":
        at += 1
    return at


def _expansions(node: Node, start: int, end: int) -> Iterator[Node]:
    stack = list(reversed(node.children))
    while stack:
        child = stack.pop()
        if child.end_byte <= start or child.start_byte >= end:
            continue
        if child.type in EXPANSIONS and child.start_byte >= start and child.end_byte <= end:
            yield child
        elif child.type not in QUOTED:
            stack += reversed(child.children)


def lits(source: Source, start: int, end: int) -> Iterator[Lit]:
    """The raw text between two bytes, a Lit for each line and each piece of another place."""
    at = start
    index = bisect_right(source.marks, start, key=lambda mark: mark[0])
    while at < end:
        cut = source.data.find(b"\n", at, end) + 1 or end
        while index < len(source.marks) and source.marks[index][0] <= at:
            index += 1
        if index < len(source.marks):
            cut = min(cut, source.marks[index][0])
        yield Lit(source.text(at, cut), source.at(at))
        at = cut
