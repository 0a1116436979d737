"""Shell arithmetic on what is known: `$((NODES * 8))`, `(( i++ ))`, `${a:1:2}`.

A precedence climber over its own tokens; names are looked up by the caller. 64-bit integers, as bash has.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_DEPTH = 20
MAX_CHARS = 4_000

TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*(?:\[[^\]]*\])?|"
    r"<<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|<=|>=|==|!=|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
)
LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"),
    ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
ASSIGN = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="})
NAME = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]*\])?")

Look = Callable[[str], int]
Store = Callable[[str, int], None]


class ArithmeticFaultError(Exception):
    """The expression is malformed, or divides by zero; bash would stop with an error."""


def evaluate(text: str, look: Look, store: Store) -> int:
    """The value of an expression.

    Args:
        look: the value of a variable; it may raise to say that the variable is unknown.
        store: called for assignments inside the expression.

    Raises: ArithmeticFaultError, and whatever `look` raises.
    """
    return _Reader(text, look, store).whole()


class _Reader:
    def __init__(self, text: str, look: Look, store: Store) -> None:
        if len(text) > MAX_CHARS:
            raise ArithmeticFaultError("too long")
        self.look, self.store, self.depth = look, store, 0
        self.tokens: list[str] = []
        at = 0
        text = text.strip()
        while at < len(text):
            match = TOKEN.match(text, at)
            if match is None:
                raise ArithmeticFaultError(text)
            self.tokens.append(match[1])
            at = match.end()
        self.at = 0
        self.live = True  # False inside the side of ?: && || that is not taken

    def whole(self) -> int:
        if not self.tokens:
            return 0
        value = self.comma()
        if self.at < len(self.tokens):
            raise ArithmeticFaultError(self.tokens[self.at])
        return value

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if token and token in wanted:
            self.at += 1
            return token
        return ""

    def comma(self) -> int:
        value = self.assign()
        while self.take(","):
            value = self.assign()
        return value

    def assign(self) -> int:
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        if NAME.fullmatch(self.peek()) and following in ASSIGN:
            name = self.peek()
            self.at += 2
            value = self.assign()
            if following != "=":
                value = self.apply(following[:-1], self.read(name), value)
            return self.write(name, value)
        return self.ternary()

    def ternary(self) -> int:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ArithmeticFaultError("nested too deeply")
        value = self.binary(0)
        if self.take("?"):
            first = self.skipping(not value, self.assign)
            if not self.take(":"):
                raise ArithmeticFaultError("? without :")
            second = self.skipping(bool(value), self.ternary)
            value = first if value else second
        self.depth -= 1
        return value

    def skipping(self, skip: bool, part: Callable[[], int]) -> int:
        before, self.live = self.live, self.live and not skip
        try:
            return part()
        finally:
            self.live = before

    def binary(self, level: int) -> int:
        if level == len(LEVELS):
            return self.power()
        value = self.binary(level + 1)
        while operator := self.take(*LEVELS[level]):
            if operator in ("&&", "||"):
                skip = bool(value) == (operator == "||")
                other = self.skipping(skip, lambda: self.binary(level + 1))
                value = int(bool(value) if skip else bool(other))
            else:
                value = self.apply(operator, value, self.binary(level + 1))
        return value

    def power(self) -> int:
        value = self.unary()
        if self.take("**"):
            exponent = self.power()
            if not 0 <= exponent <= 62:
                raise ArithmeticFaultError("exponent")
            value = _wrap(value**exponent)
        return value

    def unary(self) -> int:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ArithmeticFaultError("nested too deeply")
        try:
            if operator := self.take("++", "--"):
                name = self.peek()
                self.at += 1
                return self.write(name, self.read(name) + (1 if operator == "++" else -1))
            if operator := self.take("-", "+", "!", "~"):
                value = self.unary()
                return {"-": -value, "+": value, "!": int(not value), "~": ~value}[operator]
            return self.primary()
        finally:
            self.depth -= 1

    def primary(self) -> int:
        if self.take("("):
            value = self.comma()
            if not self.take(")"):
                raise ArithmeticFaultError("( without )")
            return value
        token = self.peek()
        self.at += 1
        if NAME.fullmatch(token):
            value = self.read(token)
            if operator := self.take("++", "--"):
                self.write(token, value + (1 if operator == "++" else -1))
            return value
        return number(token)

    def read(self, name: str) -> int:
        if not NAME.fullmatch(name):
            raise ArithmeticFaultError(name)
        return self.look(name) if self.live else 0

    def write(self, name: str, value: int) -> int:
        if not NAME.fullmatch(name):
            raise ArithmeticFaultError(name)
        if self.live:
            self.store(name, _wrap(value))
        return _wrap(value)

    def apply(self, operator: str, left: int, right: int) -> int:
        if operator in ("/", "%"):
            if right == 0:
                if self.live:
                    raise ArithmeticFaultError("division by zero")
                return 0
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return _wrap(quotient if operator == "/" else left - quotient * right)
        if operator in ("<<", ">>"):
            return _wrap(left << (right & 63) if operator == "<<" else left >> (right & 63))
        return _wrap(int(SIMPLE[operator](left, right)))


SIMPLE: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}


def number(token: str) -> int:
    """A literal: decimal, 0x, 0 (octal), or base#digits.

    Raises: ArithmeticFaultError.
    """
    try:
        if "#" in token:
            base, digits = token.split("#", 1)
            return _wrap(int(digits, int(base)))
        if token[:2] in ("0x", "0X"):
            return _wrap(int(token, 16))
        if not token.isdecimal() or len(token) > 40:
            raise ArithmeticFaultError(token)
        return _wrap(int(token, 8) if token[0] == "0" and len(token) > 1 else int(token))
    except ValueError as exc:
        raise ArithmeticFaultError(token) from exc


def _wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
