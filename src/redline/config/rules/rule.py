"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redline.config.flags import to_flag
from redline.config.problems import Problem
from redline.config.tree import RunConfig, options_by_field

Broken = tuple[str, str] | None  # (what is wrong, how to mend it), or None when the rule holds


@dataclass(frozen=True, slots=True)
class Rule:
    """One named condition that joins several options.

    Attributes:
        name: how errors and docs/options.md cite it.
        fields: the options it joins, by field name.
        why: the reason, one sentence.
        check: (what, mend) when a configuration breaks it, else None.
        training: True when it concerns training alone, not the planner or the doctor.
    """

    name: str
    fields: tuple[str, ...]
    why: str
    check: Callable[[RunConfig], Broken]
    training: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags it joins."""
        return tuple(map(to_flag, self.fields))

    def problem(self, config: RunConfig) -> Problem | None:
        """The problem of a configuration that breaks this rule."""
        broken = self.check(config)
        return Problem(self.name, broken[0], self.why, broken[1], self.flags) if broken else None


def rule(
    name: str, *names: str, why: str, training: bool = False
) -> Callable[[Callable[[RunConfig], Broken]], Rule]:
    """Make the function below a Rule that joins the options `names`."""
    return lambda check: Rule(name, names, why, check, training)


def rules_of(module: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules that a module defines, in order."""
    return tuple(value for value in module.values() if isinstance(value, Rule))


def show(name: str, value: Any) -> str:
    """An option, by field name, with a value, as one would type it."""
    return options_by_field()[name].show(value)
