"""Words of the syntax tree to texts: quotes, parameters, arrays, arithmetic, harmless substitutions.

Everything is decided from the script's own text. A command substitution is never run: what it would print is
a hole, except `$(dirname ...)`, `$(basename ...)` and `$(echo ...)`, which are pure functions of their words,
and `$(cat file)` of a file beside the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redline.config.launch.arithmetic import ArithmeticFaultError, evaluate
from redline.config.launch.bash import EXPANSIONS, Source, first_byte, gaps, lits
from redline.config.launch.nearby import text_beside
from redline.config.launch.parameters import Parameters, pieces_of, text_at, text_of
from redline.config.launch.shell import (
    CALCULATED,
    Notes,
    OpenError,
    Scalar,
    Shell,
)
from redline.config.launch.strings import ansi, unescape, unescape_quoted
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
    bounded,
    choice,
    known,
    lit,
    names_of,
    render,
    size,
    split,
    unknown,
    variants,
)
from redline.config.launch.vocabulary import QUIET

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_RANGE = 4096


@dataclass(frozen=True, slots=True)
class Expander:
    """Expands words of one source in one shell."""

    source: Source
    shell: Shell
    notes: Notes

    @property
    def parameters(self) -> Parameters:
        """The expander of $NAME and ${NAME...} here."""
        return Parameters(self)

    # Words

    def words(self, nodes: Iterable[Node]) -> list[Item]:
        """The words that the shell makes of these."""
        found: list[Item] = []
        for node in nodes:
            self.notes.spend(self.source.place(node))
            found += split(self.pieces(node))
        work = sum(size(item) // 1000 + len(item) // 20 for item in found if not isinstance(item, Alt))
        self.notes.spend(self.source.at(0), len(found) // 8 + work)
        return found

    def text(self, node: Node) -> Text:
        """The one text of a word that is not split, as on the right of "="."""
        self.notes.spend(self.source.place(node))
        joined: list[Lit | Hole] = []
        for piece in self.pieces(node):
            if isinstance(piece, Quoted):
                joined += [piece.segment] if piece.segment else []
            elif isinstance(piece, Alt):
                joined += self.alt_text(piece)
            elif isinstance(piece, Lit | Hole):
                joined.append(piece)
            elif joined:
                joined.append(Lit(" ", self.source.place(node)))
        whole = tuple(joined)
        self.notes.spend(self.source.place(node), size(whole) // 1000 + len(whole) // 20)
        return bounded(whole, self.source.place(node))

    def alt_text(self, alt: Alt) -> Text:
        options = [self.joined(stream, alt.place) for stream in alt.streams]
        return (choice(alt.names, alt.place, alt.why, options),)

    def joined(self, items: Items | list[Item], place: Place) -> Text:
        """Words with a space between, as "${array[*]}" gives them."""
        row: list[Lit | Hole] = []
        for number, item in enumerate(items):
            if number:
                row.append(Lit(" ", place))
            row += self.alt_text(item) if isinstance(item, Alt) else item
        return tuple(row)

    # Pieces of one word

    def pieces(self, node: Node) -> list[Piece]:
        """What a word is made of, each piece with whether it may be split."""
        kind = node.type
        if kind in EXPANSIONS:
            return self.expansion(node, quoted=False)
        if kind in ("string", "translated_string"):
            start = node.start_byte + (2 if kind == "translated_string" else 1)
            return self._quoted(node, start, node.end_byte - 1)
        if kind == "raw_string":
            return [Quoted(None), *map(Quoted, self._lits(node, node.start_byte + 1, node.end_byte - 1))]
        if kind == "ansi_c_string":
            raw = self.source.text(node.start_byte + 2, node.end_byte - 1)
            return [Quoted(None), *map(Quoted, lit(ansi(raw), self.source.place(node)))]
        if kind in ("concatenation", "command_name") and node.children:
            return [piece for child in node.children for piece in self.pieces(child)]
        if kind == "brace_expression":
            return self._braces(node)
        if kind == "process_substitution":
            return [self.hole("$(file)", node, "it names the output of a command, which is not run.")]
        return self._bare(node)

    def _bare(self, node: Node) -> list[Piece]:
        found: list[Piece] = []
        for part in gaps(self.source, node, node.start_byte, node.end_byte):
            if isinstance(part, tuple):
                for piece in lits(self.source, *part):
                    found += self.with_holes(piece._replace(text=unescape(piece.text)))
            else:
                found += self.expansion(part, quoted=False)
        return found

    def with_holes(self, piece: Lit, *, quoted: bool = False) -> list[Piece]:
        """A literal in which private characters are holes again."""
        if not self.source.holes:
            return [Quoted(piece)] if piece.text else []
        found: list[Piece] = []
        run = ""
        for character in piece.text:
            hole = self.source.holes.get(character)
            if hole is None:
                run += character
                continue
            if run:
                found.append(Quoted(piece._replace(text=run)))
            found.append(Quoted(hole) if quoted else hole)
            run = ""
        return [*found, Quoted(piece._replace(text=run))] if run else found

    def _lits(self, node: Node, start: int, end: int) -> list[Lit | Hole]:
        found: list[Lit | Hole] = []
        for piece in lits(self.source, start, end):
            for part in self.with_holes(piece, quoted=True):
                if isinstance(part, Quoted) and part.segment:
                    found.append(part.segment)
        return found

    def _quoted(self, node: Node, start: int, end: int) -> list[Piece]:
        found: list[Piece] = [] if self._only_array(node, start, end) else [Quoted(None)]
        for part in gaps(self.source, node, start, end):
            if isinstance(part, tuple):
                for piece in lits(self.source, *part):
                    found += self.with_holes(piece._replace(text=unescape_quoted(piece.text)), quoted=True)
            else:
                found += self.expansion(part, quoted=True)
        return found

    def _only_array(self, node: Node, start: int, end: int) -> bool:
        """Whether a quoted word is "${array[@]}" or "$@" alone, which may give no word at all."""
        raw = self.source.text(start, end)
        return raw == "$@" or (raw.startswith("${") and raw.endswith(("[@]}", "{@}")))

    def heredoc(self, node: Node) -> Text:
        """The body of a heredoc whose delimiter is not quoted."""
        found: list[Lit | Hole] = []
        for piece in self._quoted(node, node.start_byte, node.end_byte):
            if isinstance(piece, Quoted) and piece.segment:
                found.append(piece.segment)
            elif isinstance(piece, Alt):
                found += self.alt_text(piece)
        return tuple(found)

    def given(self, node: Node) -> Text | None:
        """The text of a heredoc or herestring."""
        for child in node.children:
            if child.type == "herestring_redirect" and child.children:
                return self.text(child.children[-1])
            if child.type != "heredoc_redirect":
                continue
            opening = next((part for part in child.children if part.type == "heredoc_start"), None)
            body = next((part for part in child.children if part.type == "heredoc_body"), None)
            if opening is None or body is None:
                return None
            quoted = any(mark in self.source.text(opening.start_byte, opening.end_byte) for mark in "'\"\\")
            return self.raw(body) if quoted else self.heredoc(body)
        return None

    def raw(self, node: Node) -> Text:
        """The characters of a node as they stand."""
        return tuple(self._lits(node, node.start_byte, node.end_byte))

    def _braces(self, node: Node) -> list[Piece]:
        raw = self.source.text(node.start_byte, node.end_byte)
        place = self.source.place(node)
        match = re.fullmatch(r"\{(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?\}", raw)
        if match is None:
            return [Quoted(Lit(raw, place))]
        first, last = int(match[1]), int(match[2])
        step = abs(int(match[3] or 1)) or 1
        width = max(len(match[1]), len(match[2])) if re.search(r"(^|\D)0\d", raw) else 0
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        found: list[Piece] = []
        for number in numbers[:MAX_RANGE]:
            found += [Quoted(Lit(str(number).zfill(width), place)), BREAK]
        return found[:-1]

    def hole(self, name: str, node: Node, why: str, *, harmless: bool = False) -> Hole:
        return Hole((name,), self.source.place(node), why, harmless=harmless)

    # Expansions

    def expansion(self, node: Node, *, quoted: bool) -> list[Piece]:
        self.notes.spend(self.source.place(node))
        if node.type == "simple_expansion":
            name = self.source.text(first_byte(self.source, node) + 1, node.end_byte)
            return self.parameters.parameter(name, "", node, quoted=quoted)
        if node.type == "expansion":
            return self.parameters.braced(node, quoted=quoted)
        if node.type == "arithmetic_expansion":
            return pieces_of(self.arithmetic(node), quoted=quoted)
        return pieces_of(self._substitution(node), quoted=quoted)

    # Arithmetic

    def arithmetic(self, node: Node) -> Text:
        """$((...)), the text of its value."""
        place = self.source.place(node)
        begins = first_byte(self.source, node)
        opened = 3 if self.source.data.startswith(b"$((", begins) else 2
        expression = self.expression(node, begins + opened, node.end_byte - opened + 1)
        try:
            return lit(str(self.calculate(expression, place)), place, self._taken(expression))
        except OpenError as unsure:
            return (Hole(unsure.names, place, CALCULATED),)
        except ArithmeticFaultError:
            return unknown("$((...))", place, "this arithmetic is not understood.")

    def expression(self, node: Node, start: int, end: int) -> Text:
        """The text of an arithmetic expression, its expansions done."""
        row: list[Piece] = []
        for part in gaps(self.source, node, start, end):
            if isinstance(part, tuple):
                text = self.source.text(*part).replace("\\\n", " ").replace('"', "")
                row += self.with_holes(Lit(text, self.source.place(node)), quoted=True)
            else:
                row += self.expansion(part, quoted=True)
        return text_of(row)

    def calculate(self, expression: Text | str, place: Place) -> int:
        """The value of an expression.

        Raises: ArithmeticFaultError, OpenError.
        """
        text = expression if isinstance(expression, str) else known(expression)
        if text is None:
            options = variants(expression) if not isinstance(expression, str) else None
            values = {self.calculate(option, place) for option in options or ()}
            if len(values) == 1:
                return values.pop()
            raise OpenError(names_of(expression) if not isinstance(expression, str) else ())
        self.notes.spend(place, 1 + len(text) // 50)
        return evaluate(
            text, lambda name: self._look(name, place), lambda name, value: self._store(name, value, place)
        )

    def _look(self, name: str, place: Place) -> int:
        bare, _, rest = name.partition("[")
        value = text_at(
            self.shell.get(bare, place, self.notes), self.parameters.index(rest.rstrip("]")) if rest else ""
        )
        if value is None:
            if bare in self.notes.owned:
                return 0
            raise OpenError((bare,))
        text = known(value)
        if text is None:
            options = variants(value)
            if options is None or len(options) != 1:
                raise OpenError(names_of(value))
            text = options[0]
        if not text.strip():
            return 0
        match = re.fullmatch(r"\s*(-?)\s*(\d{1,18})\s*", text)
        if match is None:
            raise OpenError((bare,))
        return int(match[2]) * (-1 if match[1] else 1)

    def _store(self, name: str, value: int, place: Place) -> None:
        if "[" not in name:
            self.shell.set(name, Scalar(lit(str(value), place)), self.notes)

    def _taken(self, expression: Text) -> str:
        """The assumption that a known expression stands on."""
        direct = next((piece.taken for piece in expression if isinstance(piece, Lit) and piece.taken), "")
        if direct:
            return direct
        for name in re.findall(r"[A-Za-z_]\w*", render(expression)):
            value = self.shell.variables.get(name)
            if isinstance(value, Scalar):
                for piece in value.text:
                    if isinstance(piece, Lit) and piece.taken:
                        return str(piece.taken)
            elif name in self.notes.taken:
                return str(name)
        return ""

    # Command substitution

    def _substitution(self, node: Node) -> Text:
        place = self.source.place(node)
        inner = [child for child in node.children if child.is_named and child.type != "comment"]
        if len(inner) == 1 and inner[0].type == "redirected_statement":
            given = self.given(inner[0])
            if given is not None and inner[0].text is not None and inner[0].text.lstrip().startswith(b"cat"):
                return given
        if len(inner) == 1 and inner[0].type == "command":
            words = self.words(child for child in inner[0].children if child.type != "variable_assignment")
            texts = [word for word in words if not isinstance(word, Alt)]
            if len(texts) == 2 and known(texts[0]) == "cat" and (said := text_beside(texts[1], self.notes)):
                return said
            result = _pure([render(text) for text in texts], texts, place)
            if result is not None:
                return result
        raw = " ".join(self.source.text(first_byte(self.source, node), node.end_byte).split())
        first = re.sub(r"^[$(`\s]+", "", raw).split(" ", 1)[0].rstrip(")`")
        shown = raw if len(raw) <= 40 else f"{raw[:36]}...)"
        quiet = first in QUIET
        return unknown(shown, place, "commands are not run.", harmless=quiet)


def _pure(words: list[str], texts: list[Text], place: Place) -> Text | None:
    """What a command that is a pure function of its words prints; None for any other."""
    if not words:
        return None
    if words[0] == "echo" and len(words) > 1 and not words[1].startswith("-"):
        row: list[Lit | Hole] = []
        for text in texts[1:]:
            row += [Lit(" ", place), *text] if row else text
        return tuple(row)
    if words[0] not in ("dirname", "basename") or len(words) < 2:
        return None
    path = known(texts[1])
    if path is None:
        return None
    cut = path.rstrip("/") or "/"
    if words[0] == "dirname":
        return lit(cut.rpartition("/")[0] or ("/" if cut.startswith("/") else "."), place)
    name = cut.rpartition("/")[2]
    return lit(name.removesuffix(words[2]) if len(words) > 2 else name, place)
