"""A configuration held against everything that could be wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redline.config.flags import SET, Option
from redline.config.problems import Problem
from redline.config.rules import layout, model, precision, recompute, training, transformer_engine
from redline.config.rules.rule import Rule, show
from redline.config.tree import RunConfig, options, value_of

MODULES = (model, training, layout, recompute, precision, transformer_engine)
RULES: tuple[Rule, ...] = tuple(rule for module in MODULES for rule in module.RULES)


def refusals(config: RunConfig) -> list[Problem]:
    """Each option whose value this release cannot obey."""
    found = (option.refusal(value_of(config, option.field)) for option in options())
    return [problem for problem in found if problem]


def violations(
    config: RunConfig, *, explicit: frozenset[str] | None = None, training: bool = True
) -> list[Problem]:
    """Each rule that `config` breaks; `explicit` and `training` as in layers.check."""
    broken = (rule.problem(config) for rule in RULES if training or not rule.training)
    return [*_exclusions(config), *_ineffective(config, explicit), *filter(None, broken)]


def _exclusions(config: RunConfig) -> Iterator[Problem]:
    """Options of one `excludes` group that are given together."""
    groups: dict[str, list[Option]] = {}
    for option in options():
        if option.spec.excludes and value_of(config, option.field) != option.default:
            groups.setdefault(option.spec.excludes, []).append(option)
    for group, given in groups.items():
        if len(given) > 1:
            typed = [option.show(value_of(config, option.field)) for option in given]
            what, why = (
                f"{' and '.join(typed)} exclude each other.",
                "they state the same thing in different ways.",
            )
            yield Problem(
                f"one-of/{group}", what, why, "keep one of them.", tuple(option.flag for option in given)
            )


def _ineffective(config: RunConfig, explicit: frozenset[str] | None) -> Iterator[Problem]:
    """Stated options without the values of others that they need."""
    for option in options():
        value = value_of(config, option.field)
        if value == option.default or not (explicit is None or option.field in explicit):
            continue
        for name, wanted in option.spec.needs.items():
            if not satisfies(value_of(config, name), wanted):
                need = show_need(name, wanted)
                what, why = (
                    f"{option.show(value)} has no effect without {need}.",
                    "an option acts or is refused.",
                )
                flags = (option.flag, "--" + name.replace("_", "-"))
                yield Problem(f"needs/{option.flag[2:]}", what, why, f"add {need}, or leave it out.", flags)


def satisfies(value: Any, wanted: Any) -> bool:
    """Whether an option's value is what another option needs it to be."""
    if wanted is SET:
        return bool(value)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def show_need(name: str, wanted: Any) -> str:
    """What an option needs, as one would type it."""
    if wanted is SET or wanted is None:
        flag = "--" + name.replace("_", "-")
        return flag if wanted is SET else f"{flag} none"
    return " or ".join(show(name, value) for value in (wanted if isinstance(wanted, tuple) else (wanted,)))
