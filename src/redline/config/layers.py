"""From stated values to a RunConfig: defaults, then the preset, then the TOML file, then the flags.

A later layer overrides an earlier one, and takes with it what can no longer stand beside it: where options
exclude each other the later one stays (`--fp16` over a file's `bf16 = true`), and an option that needs
another's value falls back to its default once a later layer changed that value (`--no-use-rope-scaling`
over a preset). Within one layer both are mistakes, and said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from redline.config.flags import MANY, Option, Spelling, to_flag
from redline.config.model import REQUIRED_FIELDS
from redline.config.presets import PRESETS
from redline.config.problems import Problem, raise_problems, suggestion
from redline.config.rules import refusals, satisfies, violations
from redline.config.tree import RunConfig, options_by_field, with_values

DEMO = "demo"
Ranked = dict[str, tuple[int, Any]]  # field -> (rank of the layer that stated it, value)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A configuration, and the fields that the user stated by flag or file (not by preset).

    Attributes:
        notices: what to say once of how it was stated.
    """

    config: RunConfig
    explicit: frozenset[str]
    notices: tuple[str, ...] = ()


@dataclass(slots=True)
class Layer:
    """Values stated in one place, gathered one spelling at a time.

    Attributes:
        given: every value of each option, in order; the last of them is in `values`.
    """

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, list[Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    stated_by: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def put(self, name: str, spelling: Spelling, value: Any) -> None:
        """State `value` by the flag or key `name`.

        The last value of a repeated option counts, of a list too, as argparse has it; `notices` says so.
        A shorthand (`--swiglu`) and another value are a mistake.
        """
        option = spelling.option
        if fault := option.fault(value):
            self.problems.append(option.bad_value(value, fault))
            return
        before, by_shorthand = self.stated_by.get(option.field, (name, False))
        if (by_shorthand or spelling.shorthand) and before != name and self.values[option.field] != value:
            what = f"{before} and {name} ask for different values of {option.flag}."
            why = (
                f"{before} means {option.show(self.values[option.field])}, {name} means {option.show(value)}."
            )
            self.problems.append(Problem("one-spelling", what, why, "keep one of them.", (option.flag,)))
        self.values[option.field] = value
        self.given.setdefault(option.field, []).append(value)
        self.stated_by[option.field] = (name, spelling.shorthand)

    def notices(self) -> Iterator[str]:
        """A sentence for each option that was given several values, of which the last counts."""
        for name, values in self.given.items():
            if all(value == values[-1] for value in values):
                continue
            option = options_by_field()[name]
            times = "twice" if len(values) == 2 else f"{len(values)} times"
            shown = ", then ".join(map(option.show, values))
            hint = "; several values follow one flag" if option.count == MANY else ""
            yield f"{option.flag} is given {times}: {shown}. The last one counts{hint}."


def resolve(file: Layer, flags: Layer, *, training: bool = True) -> Parsed:
    """The configuration that the layers make together.

    Args:
        training: whether it must be possible to train with it now. The planner and the doctor pass False,
            then what is not available yet is no problem, and neither is a run without a length.

    Raises: InvalidConfigError with everything that is wrong.
    """
    stated = file.values | flags.values
    preset = preset_of(stated)
    problems = [*file.problems, *flags.problems, *_shape_problems(preset, stated)]
    preset_values = {"preset": preset, **PRESETS.get(preset, {})} if preset else {}
    config = with_values(RunConfig(), merge(preset_values, file.values, flags.values))
    explicit = frozenset(stated)
    if preset is None or preset in PRESETS:
        problems += found(config, problems, explicit=explicit, training=training)
    raise_problems(problems)
    return Parsed(config, explicit, (*file.notices(), *flags.notices()))


def preset_of(stated: Mapping[str, Any]) -> str | None:
    """The preset that is stated, else the demo where nothing says which model is meant."""
    chosen = stated.keys() & set(REQUIRED_FIELDS) or stated.get("use_checkpoint_args")
    preset: str | None = stated.get("preset")
    return DEMO if preset is None and not chosen else preset


def _shape_problems(preset: str | None, stated: Mapping[str, Any]) -> list[Problem]:
    """The model's shape neither comes from a known preset nor is stated whole."""
    if preset is not None:
        if preset in PRESETS:
            return []
        what, why = (
            f"--preset {preset}: there is no such preset.",
            "a preset is one of the models in docs/options.md.",
        )
        mend = suggestion(preset, PRESETS, f"the presets are {', '.join(PRESETS)}.")
        return [Problem("unknown-preset", what, why, mend, ("--preset",))]
    missing = tuple(to_flag(name) for name in REQUIRED_FIELDS if name not in stated)
    if not missing or stated.get("use_checkpoint_args"):
        return []
    what = f"the model's shape is incomplete: {' and '.join(missing)} not given."
    why = "layers, hidden size and heads are stated together, or come from a preset."
    return [
        Problem(
            "shape-stated", what, why, "give them, or --preset NAME.", tuple(map(to_flag, REQUIRED_FIELDS))
        )
    ]


def check(config: RunConfig, *, explicit: frozenset[str] | None = None, training: bool = True) -> None:
    """Hold `config` against the rules.

    Args:
        explicit: the fields that were stated; None takes every value that is not a default as stated.
        training: also refuse what cannot be trained now.

    Raises: InvalidConfigError with all that is broken.
    """
    raise_problems(found(config, [], explicit=explicit, training=training))


def found(
    config: RunConfig, before: list[Problem], *, explicit: frozenset[str] | None, training: bool
) -> list[Problem]:
    """What is wrong with `config` beyond `before`, leaving out rules about flags already complained of."""
    refused = refusals(config) if training else []
    settled = {flag for problem in [*before, *refused] for flag in problem.flags}
    broken = violations(config, explicit=explicit, training=training)
    return [*refused, *(problem for problem in broken if not settled.intersection(problem.flags))]


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The values that stand after all layers, the last of which is the strongest."""
    ranked: Ranked = {}
    for rank, values in enumerate(layers):
        ranked |= {name: (rank, value) for name, value in values.items()}
    while displaced := _displaced(ranked):
        ranked |= {name: (rank, options_by_field()[name].default) for name, rank in displaced.items()}
    return {name: value for name, (_, value) in ranked.items()}


def _displaced(ranked: Ranked) -> dict[str, int]:
    """Values that a stronger layer contradicts, and its rank."""
    table = options_by_field()
    displaced = {}
    for name, (rank, value) in ranked.items():
        option = table[name]
        if value != option.default:
            against = [*_ranks_of_rivals(option, ranked), *_ranks_of_failed_needs(option, ranked)]
            if max(against, default=rank) > rank:
                displaced[name] = max(against)
    return displaced


def _ranks_of_rivals(option: Option, ranked: Ranked) -> Iterator[int]:
    """Of the options that exclude this one."""
    for name, (rank, value) in ranked.items():
        other = options_by_field()[name]
        if option.spec.excludes and other.spec.excludes == option.spec.excludes and value != other.default:
            yield rank


def _ranks_of_failed_needs(option: Option, ranked: Ranked) -> Iterator[int]:
    """Of the options that do not have the values this one needs."""
    for name, wanted in option.spec.needs.items():
        if name in ranked and not satisfies(ranked[name][1], wanted):
            yield ranked[name][0]
