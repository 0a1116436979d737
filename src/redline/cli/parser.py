"""argparse as the commands use it: mistakes are UsageErrors with the nearest name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from redline.config.problems import nearest
from redline.errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser of one command; texts stand as they are written."""

    def __init__(
        self, prog: str, *, usage: str, description: str | None = None, epilog: str | None = None
    ) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, where argparse would print and exit."""
        raise UsageError(f"{self.prog}: {message}.", mend=f"see `{self.prog} --help`.")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options. Raises: UsageError."""
        args, unknown = self.parse_known_args(words)
        if unknown:
            raise self._not_taken(unknown[0])
        return args

    def _not_taken(self, word: str) -> UsageError:
        """The error for a word that stands for nothing."""
        see = f"see `{self.prog} --help`."
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            return UsageError(f"{self.prog}: {word} is one word too many.", mend=f"leave it out, or {see}")
        known = nearest(flag, (name for name in self._option_string_actions if name.startswith("--")))
        return UsageError(
            f"{self.prog} has no option {flag}.", mend=f"did you mean {known}?" if known else see
        )


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least `least`."""

    def number(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word} is no whole number of at least {least}")
        return int(word)

    return number
