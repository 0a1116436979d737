"""Conditions: `[ ... ]`, `[[ ... ]]`, `test ...`, `(( ... ))`, decided where what they compare is known.

An answer is True, False, or None with the names that would decide it. An answer can be `presumed`: a variable
that nothing sets is taken as unset where a script asks whether it is set or switched on; should the branch
that follows only end the script (a usage message), the other one is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from redline.config.launch.arithmetic import ArithmeticFaultError
from redline.config.launch.expand import Expander
from redline.config.launch.shell import ARGUMENT, CALCULATED, COUNT, ENVIRONMENT, OpenError
from redline.config.launch.values import Hole, Lit, Place, Text, holes, known, names_of, render, variants
from redline.config.launch.vocabulary import SWITCHED_ON

if TYPE_CHECKING:
    from tree_sitter import Node

NESTED = frozenset(
    {"binary_expression", "unary_expression", "parenthesized_expression", "negated_expression"}
)
COMPARED = frozenset(
    {"=", "==", "!=", "=~", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"}
)
EQUAL = ("=", "==", "!=", "-eq", "-ne")
NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
UNARY = frozenset(f"-{letter}" for letter in "zndefghkprstuwxOGLNSbcRvo")
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Answer:
    """What a condition comes to; `names` decide it when `value` is None."""

    value: bool | None
    names: tuple[str, ...] = ()
    presumed: bool = False

    def negated(self) -> Answer:
        """The answer of `! condition`."""
        return replace(self, value=None if self.value is None else not self.value)


def both(first: Answer, second: Answer) -> Answer:
    """`first && second`."""
    presumed = first.presumed or second.presumed
    names = tuple(dict.fromkeys(first.names + second.names))
    if first.value is False:
        return first
    if second.value is False:
        return second
    if first.value is None or second.value is None:
        return Answer(None, names, presumed)
    return Answer(True, names, presumed)


def either(first: Answer, second: Answer) -> Answer:
    """`first || second`."""
    return both(first.negated(), second.negated()).negated()


def test_command(node: Node, expander: Expander) -> Answer:
    """The answer of a `[ ]`, `[[ ]]` or `(( ))` node."""
    opening = expander.source.text(node.start_byte, node.start_byte + 2)
    if opening == "((":
        return arithmetic_test(node, expander, node.start_byte + 2, node.end_byte - 2)
    tokens: list[Node] = []
    _flatten(node, tokens)
    return _Test(
        expander, [(_operator(child), child) for child in tokens], expander.source.place(node)
    ).whole()


def arithmetic_test(node: Node, expander: Expander, start: int, end: int) -> Answer:
    """Whether an arithmetic expression is not zero."""
    place = expander.source.place(node)
    try:
        expression = expander.expression(node, start, end)
        return Answer(expander.calculate(expression, place) != 0, presumed=_counts_arguments(expression))
    except OpenError as unsure:
        return Answer(None, unsure.names)
    except ArithmeticFaultError:
        return Answer(None, ("((...))",))


def words_test(nodes: list[Node], expander: Expander, place: Place) -> Answer:
    """The answer of `test` with words."""
    return _Test(expander, [(_operator(child), child) for child in nodes], place).whole()


def _flatten(node: Node, tokens: list[Node]) -> None:
    stack = list(reversed(node.children))
    while stack and len(tokens) < MAX_TOKENS:
        child = stack.pop()
        if child.type in NESTED or child.type in ("list", "test_command") or child.is_error:
            stack += reversed(child.children)
        elif child.type not in ("[", "]", "[[", "]]", ";", "\n", "comment"):
            tokens.append(child)


def _operator(node: Node) -> str:
    """The node as an operator, or "" when it is a word that must be expanded."""
    if node.type in ("word", "test_operator", "variable_name") or not node.is_named:
        return node.text.decode("utf-8", "replace") if node.text else ""
    return ""


class _Test:
    """Reads the words of one test from left to right."""

    def __init__(self, expander: Expander, tokens: list[tuple[str, Node]], place: Place) -> None:
        self.expander, self.tokens, self.place = expander, tokens, place
        self.at = 0
        self.depth = 0

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self.tokens[index][0] if index < len(self.tokens) else ""

    def whole(self) -> Answer:
        if not self.tokens:
            return Answer(False)
        answer = self.any()
        return answer if self.at >= len(self.tokens) else Answer(None, answer.names or ("[ ... ]",))

    def any(self) -> Answer:
        answer = self.all()
        while self.peek() in ("||", "-o") and self.at < len(self.tokens) - 1:
            self.at += 1
            answer = either(answer, self.all())
        return answer

    def all(self) -> Answer:
        answer = self.single()
        while self.peek() in ("&&", "-a") and self.at < len(self.tokens) - 1:
            self.at += 1
            answer = both(answer, self.single())
        return answer

    def single(self) -> Answer:
        self.depth += 1
        if self.depth > 60 or self.at >= len(self.tokens):
            return Answer(None, ("[ ... ]",))
        word, node = self.tokens[self.at]
        if word == "!" and self.at + 1 < len(self.tokens):
            self.at += 1
            return self.single().negated()
        if word == "(":
            self.at += 1
            answer = self.any()
            self.at += self.peek() == ")"
            return answer
        if self.peek(1) in COMPARED and self.at + 2 < len(self.tokens):
            operator, right = self.peek(1), self.tokens[self.at + 2][1]
            self.at += 3
            return self.compare(node, operator, right)
        if word in UNARY and self.at + 1 < len(self.tokens):
            self.at += 2
            return self.unary(word, self.tokens[self.at - 1][1])
        self.at += 1
        return self.is_set(self.text(node), wanted=True)

    def text(self, node: Node) -> Text:
        if node.type in ("regex", "extglob_pattern"):
            return self.expander.raw(node)
        return self.expander.text(node)

    def unary(self, operator: str, node: Node) -> Answer:
        if operator == "-v":
            name = known(self.text(node)) or ""
            found = self.expander.shell.get(name, self.place, self.expander.notes)
            return Answer(found is not None, (name,), presumed=found is None)
        text = self.text(node)
        if operator in ("-z", "-n"):
            return self.is_set(text, wanted=operator == "-n")
        return Answer(None, (f"[ {operator} {render(text)[:60]} ]",))

    def is_set(self, text: Text, *, wanted: bool) -> Answer:
        """-n (wanted) or -z: whether there is any text."""
        options = variants(text)
        if options is not None:
            answers = {bool(option) == wanted for option in options}
            return Answer(answers.pop()) if len(answers) == 1 else Answer(None, names_of(text))
        if any(not isinstance(segment, Hole) and segment.text for segment in text):
            return Answer(wanted)
        names = names_of(text)
        if all(name.startswith(("SLURM", "$")) for name in names) and names:
            return Answer(wanted, names, presumed=True)
        if _unset(text):
            return Answer(not wanted, names, presumed=True)
        return Answer(None, names)

    def compare(self, left: Node, operator: str, right: Node) -> Answer:
        first, second = self.text(left), self.text(right)
        if operator in NUMBERS:
            return self.numbers(first, operator, second)
        if operator == "=~":
            return self.regex(first, second)
        is_pattern = right.type in ("extglob_pattern", "word", "concatenation", "regex")
        mine, theirs = variants(first), variants(second)
        if operator in ("<", ">", "-nt", "-ot", "-ef"):
            mine = None
        if mine is None or theirs is None:
            return self.unsure(first, operator, second)
        agree = matches if is_pattern else str.__eq__
        answers = {agree(one, other) == (operator != "!=") for one in mine for other in theirs}
        if len(answers) == 1:
            for one, literal in ((first, known(second)), (second, known(first))):
                self.expander.notes.compare_default(one, literal or "", self.place)
            return Answer(answers.pop(), presumed=_counts_arguments(first + second))
        return self.unsure(first, operator, second)

    def unsure(self, first: Text, operator: str, second: Text) -> Answer:
        names = tuple(dict.fromkeys(names_of(first) + names_of(second)))
        for mine, other in ((first, second), (second, first)):
            literal = known(other)
            if literal is None or known(mine) is not None:
                continue
            if operator in EQUAL and not any(hole.why == CALCULATED for hole in holes(mine)):
                self.expander.notes.compare(names_of(mine), literal, self.place)
            if literal in SWITCHED_ON and _outside(mine) and operator in EQUAL[:3]:
                for name in names:
                    self.expander.notes.presumed.setdefault(name, self.place)
                return Answer(operator == "!=", names, presumed=True)
        return Answer(None, names or ("[ ... ]",))

    def numbers(self, first: Text, operator: str, second: Text) -> Answer:
        try:
            values = [self.expander.calculate(text, self.place) for text in (first, second)]
        except OpenError:
            return self.unsure(first, operator, second)
        except ArithmeticFaultError:
            return Answer(None, names_of(first) + names_of(second) or ("[ ... ]",))
        return Answer(NUMBERS[operator](*values), presumed=_counts_arguments(first + second))

    def regex(self, first: Text, second: Text) -> Answer:
        """=~ for the plain patterns that cannot run away; others are left open."""
        mine, pattern = variants(first), known(second)
        if mine is None or pattern is None or not re.fullmatch(r"\^?[\w.:/@=, -]*\$?", pattern):
            return self.unsure(first, "=~", second)
        answers = {re.search(pattern, option) is not None for option in mine}
        return Answer(answers.pop()) if len(answers) == 1 else self.unsure(first, "=~", second)


def _counts_arguments(text: Text) -> bool:
    """Whether "$#" of the script as launched is in a text."""
    return any(isinstance(segment, Lit) and segment.taken == COUNT for segment in text)


def _outside(text: Text) -> bool:
    """Whether a text is nothing but variables that the environment alone could set."""
    return _from_without(text, ENVIRONMENT)


def _unset(text: Text) -> bool:
    """The same, or arguments of the script."""
    return _from_without(text, (*ENVIRONMENT, ARGUMENT))


def _from_without(text: Text, reasons: tuple[str, ...]) -> bool:
    return bool(text) and all(
        isinstance(segment, Hole) and not segment.choices and not segment.harmless and segment.why in reasons
        for segment in text
    )


def matches(value: str, pattern: str) -> bool:
    """Whether a word matches a shell pattern."""
    if not any(character in pattern for character in "*?["):
        return value == pattern
    return len(value) < 2_000 and len(pattern) < 200 and fnmatchcase(value, pattern)
