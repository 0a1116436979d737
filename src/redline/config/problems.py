"""What is wrong with a configuration, collected so that a user sees all of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that cannot be obeyed.

    Attributes:
        rule: the name of the rule it breaks, for example "heads-divide-hidden".
        what: one sentence that names the flag and the value as typed.
        why: the reason.
        mend: what to change.
        flags: the flags concerned.
    """

    rule: str
    what: str
    why: str
    mend: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = ("why:  ", self.why), ("mend: ", self.mend), ("rule: ", self.rule)
        return "\n".join([f"ConfigError: {self.what}", *(f"  {name}{text}" for name, text in parts if text)])


class InvalidConfigError(ConfigError):
    """One or more options cannot be obeyed; `problems` holds each of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.what, first.why, first.mend)
        self.args = (self.problems,)

    def __str__(self) -> str:
        return "\n\n".join(str(problem) for problem in self.problems)


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise InvalidConfigError when there is any problem."""
    found = tuple(problems)
    if found:
        raise InvalidConfigError(found)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `word`, or None when none is close; leading dashes do not count."""
    from difflib import get_close_matches  # needed only once something is wrong

    names = {name.lstrip("-"): name for name in known}
    found = get_close_matches(word.lstrip("-"), list(names), n=1, cutoff=0.6)
    return names[found[0]] if found else None


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """The mend of an unknown name: the nearest known one, else `otherwise`."""
    found = nearest(word, known)
    return f"did you mean {found}?" if found else otherwise
