"""Errors of rules that only show once a config meets a number of ranks, a vocabulary or a length.

The names are shared with config/rules where a rule exists in both: there it sees only what was typed.
"""

from __future__ import annotations

from redline.config import InvalidConfigError, Problem


def broken(rule: str, what: str, why: str, mend: str, *flags: str) -> InvalidConfigError:
    """The error of one broken rule, to be raised."""
    return InvalidConfigError([Problem(rule, what, why, mend, flags)])
