"""How a dataclass field becomes a command-line flag and a TOML key.

A section writes `hidden_size: int = flag(192, at_least=1, help="...")`. From the field alone follow the flag
(`--hidden-size`), its type, default and choices; from the facts given to `flag` its help, bounds, other
spellings, and whether this release can obey it. A switch has two or three spellings: `--x`, `--no-x`, and
`--disable-x` unless it is off by default.

An option is in one of three states:
    active     it acts
    refused    it waits for work that is not done, or will not be: any value but the default is refused
    built-in   Redline always does it: asking for it is accepted and said once, asking against it is refused

Section files do not postpone the evaluation of annotations: the types are read from the fields as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin

from redline.config.problems import Problem, raise_problems
from redline.config.waits import Waits

MANY = -1  # `Option.count` of a list of any length


class Mark(Enum):
    """Values that no option can have."""

    UNSET = "unset"
    SET = "set"  # in `needs`: any value that switches the other option on


UNSET, SET = Mark.UNSET, Mark.SET


@dataclass(slots=True, kw_only=True, repr=False)
class Spec:
    """What `flag` was told beyond the field's own name, type and default.

    Attributes:
        help: one line for people.
        short: whether the short help shows it.
        metavar: the placeholder of its value in the help.
        account: the account of MFU it belongs to, where it differs from its section's.
        aliases: further flags that behave exactly as this one.
        shorthands: flags without a value that stand for one value of this option.
        at_least, more_than, at_most, less_than: bounds of a number.
        needs: other options (by field name) and the values they must have for this one to have an effect.
        excludes: options of the same name here exclude each other.
        waits_for: why the whole option is refused.
        refused: single values that are refused, and why.
        built_in: why Redline always does this.
        already: values of a refused or built-in option that describe what happens anyway.
        unset: what a switch that is neither on nor off by default follows, as "as --transformer-impl".
        other: a value apart from the default, for tests, where one cannot be guessed.
        megatron: Megatron-LM's default, where it differs ("required" when there is none).
        own: an option that Megatron-LM does not have.
    """

    help: str
    short: bool = False
    metavar: str = ""
    account: str = ""
    aliases: tuple[str, ...] = ()
    shorthands: Mapping[str, Any] = field(default_factory=dict)
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    excludes: str = ""
    waits_for: Waits | None = None
    refused: Mapping[Any, Waits] = field(default_factory=dict)
    built_in: str = ""
    already: tuple[Any, ...] = ()
    unset: str = ""
    other: Any = UNSET
    megatron: Any = UNSET
    own: bool = False


def flag(default: Any, **facts: Any) -> Any:
    """A dataclass field that is an option; `facts` are the attributes of Spec."""
    return field(default=default, metadata={"flag": Spec(**facts)})


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One option of the tree, everything derived.

    `count` is the number of values it takes: 0 for a switch, 1, n, or MANY. `kind` is the type of one value.
    """

    section: str
    field: str
    kind: type[Any]
    count: int
    optional: bool
    choices: tuple[Any, ...]
    default: Any
    account: str
    spec: Spec

    @property
    def flag(self) -> str:
        """The main spelling, for example "--hidden-size"."""
        return to_flag(self.field)

    @property
    def state(self) -> Literal["active", "refused", "built-in"]:
        """Whether it acts, is refused, or is always done."""
        if self.spec.built_in:
            return "built-in"
        return "refused" if self.spec.waits_for else "active"

    @property
    def shown_flag(self) -> str:
        """The flag as help shows it: "--[no-]x" for a switch that is on by default, or wherever it can be."""
        acts = self.default is True or (self.default is None and self.refusal(False) is None)
        return f"--[no-]{self.flag[2:]}" if self.kind is bool and acts else self.flag

    @property
    def metavar(self) -> str:
        """The placeholder of its value: "N", "X", "TEXT", or the choices."""
        if self.kind is bool:
            return ""
        listed = "{" + ",".join(map(str, self.obeyed_choices)) + "}" if self.choices else ""
        word = self.spec.metavar or listed or {int: "N", float: "X", str: "TEXT"}[self.kind]
        return f"{word} ..." if self.count == MANY else " ".join([word] * self.count)

    @property
    def obeyed_choices(self) -> tuple[Any, ...]:
        """The choices that are not refused by themselves."""
        return tuple(choice for choice in self.choices if choice not in self.spec.refused)

    def spellings(self) -> Iterator[tuple[str, Spelling]]:
        """Every flag that sets this option, with what it means."""
        for name in (self.flag, *self.spec.aliases):
            if self.kind is not bool:
                yield name, Spelling(self)
                continue
            yield name, Spelling(self, True)
            yield f"--no-{name[2:]}", Spelling(self, False)
            if self.default is not False:
                yield f"--disable-{name[2:]}", Spelling(self, False)
        for name, value in self.spec.shorthands.items():
            yield name, Spelling(self, value, shorthand=True)

    def show(self, value: Any) -> str:
        """The option and `value` as one would type them: "--hidden-size 64", "--no-bf16"."""
        if self.kind is bool and value is not None:
            return self.flag if value else to_flag(f"no_{self.field}")
        return f"{self.flag} {show_value(value)}"

    def from_words(self, words: list[str]) -> Any:
        """The value typed as `words`; a word that does not fit is kept for `fault` to complain of."""
        if self.optional and words == ["none"]:
            return None
        values = tuple(_number(self.kind, word) for word in words)
        return values[0] if self.count == 1 else values

    def fault(self, value: Any) -> str:
        """Why `value` cannot be this option's value, as the end of a sentence; "" when it can."""
        if value is None:
            return "" if self.optional else "is not a value of this option"
        if self.count in (0, 1):
            return self._fault_of_one(value)
        if not isinstance(value, tuple):
            return "must be a list"
        if self.count != MANY and len(value) != self.count:
            return f"must have {self.count} values"
        return next(filter(None, map(self._fault_of_one, value)), "")

    def _fault_of_one(self, value: Any) -> str:
        spec = self.spec
        if isinstance(value, bool) != (self.kind is bool) or not isinstance(value, self.kind):
            names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
            return f"must be {names[self.kind]}"
        if self.choices:
            return (
                "" if value in self.choices else f"must be one of {', '.join(map(str, self.obeyed_choices))}"
            )
        if self.kind is str:
            return "" if value and value.isprintable() else "must be printable text, not empty"
        if self.kind is bool:
            return ""
        if value - value != 0:  # infinite or not a number
            return "must be finite"
        if spec.at_least is not None and value < spec.at_least:
            return f"must be at least {spec.at_least}"
        if spec.more_than is not None and value <= spec.more_than:
            return f"must be more than {spec.more_than}"
        if spec.at_most is not None and value > spec.at_most:
            return f"must be at most {spec.at_most}"
        if spec.less_than is not None and value >= spec.less_than:
            return f"must be less than {spec.less_than}"
        return ""

    def bad_value(self, value: Any, fault: str) -> Problem:
        """The problem of a value that `fault` complained of."""
        return Problem(
            "bad-value",
            f"{self.show(value)}: the value {fault}.",
            f"it means: {self.spec.help}",
            f"for example {self.show(self.another_value())}."
            if self.kind is not bool
            else "give true or false.",
            (self.flag,),
        )

    def refusal(self, value: Any) -> Problem | None:
        """Why this release cannot obey `value`, or None when it can."""
        spec = self.spec
        if value == self.default or value in spec.already:
            return None
        if spec.built_in:
            what, mend = f"{self.show(value)} cannot be obeyed.", "leave it out."
            return Problem(
                f"built-in/{self.flag[2:]}", what, f"built in: {spec.built_in}", mend, (self.flag,)
            )
        values = value if isinstance(value, tuple) else (value,)
        waits = spec.waits_for or next((spec.refused[item] for item in values if item in spec.refused), None)
        if waits is None:
            return None
        what = f"{self.show(value)} is {'not part of Redline' if waits.never else 'not available yet'}."
        return Problem(waits.rule, what, waits.why, waits.mend, (self.flag,))

    def notice(self, value: Any) -> str | None:
        """What to say once when `value` asks for something that happens anyway."""
        if value == self.default or value not in self.spec.already:
            return None
        reason = self.spec.built_in or "nothing else is available yet."
        return f"built in: {self.show(value)}: {reason}"

    def another_value(self) -> Any:
        """A well-formed value that is not the default: an obeyed one where there is any."""
        spec = self.spec
        if spec.other is not UNSET:
            return spec.other
        if self.kind is bool:
            if spec.built_in:
                return spec.already[0]
            return not (self.default or True in spec.already)
        if self.choices:
            one = next(choice for choice in (*self.obeyed_choices, *self.choices) if choice != self.default)
        elif self.kind is str:
            one = "other"
        else:
            one = self.kind(self._another_number())
        return one if self.count == 1 else (one,) * max(self.count, 1)

    def _another_number(self) -> float:
        number = self.default if isinstance(self.default, int | float) else 0
        spec = self.spec
        if spec.less_than is not None or spec.at_most is not None:
            return number / 2 if number else 0.5
        return max(number, spec.at_least or 0, spec.more_than or 0) + 1


@dataclass(frozen=True, slots=True)
class Spelling:
    """One flag: the option it sets, and the value it stands for (UNSET when the value follows it)."""

    option: Option
    constant: Any = UNSET
    shorthand: bool = False


class Section:
    """Base of every section: a frozen dataclass of options whose values fit their fields."""

    __slots__ = ()
    title: ClassVar[str]
    account: ClassVar[str] = ""

    def __post_init__(self) -> None:
        values = ((option, getattr(self, option.field)) for option in options_of(type(self)))
        faults = ((option, value, option.fault(value)) for option, value in values)
        raise_problems(option.bad_value(value, fault) for option, value, fault in faults if fault)


def options_of(section: type[Section]) -> tuple[Option, ...]:
    """The options of one section, in the order of its fields."""
    return _options_of(section)  # type: ignore[arg-type]  # mypy asks a class for an instance's hash


@cache
def _options_of(section: Any) -> tuple[Option, ...]:
    name = section.__name__.removesuffix("Config").lower()
    return tuple(_option(name, section.account, f) for f in fields(section))


def _option(section: str, account: str, f: Any) -> Option:
    spec: Spec = f.metadata["flag"]
    kind, count, optional, choices = read_type(f.type)
    if spec.built_in and not spec.already:
        spec.already = (True,)
    return Option(section, f.name, kind, count, optional, choices, f.default, spec.account or account, spec)


def read_type(annotation: Any) -> tuple[type[Any], int, bool, tuple[Any, ...]]:
    """(type of one value, number of values, may be None, choices) of a field's annotation."""
    optional, count = False, 1
    choices: tuple[Any, ...] = ()
    if isinstance(annotation, UnionType) or get_origin(annotation) not in (None, tuple, Literal):
        (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
        optional = True
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        count = MANY if parts[-1] is ... else len(parts)
        annotation = parts[0]
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        annotation = type(choices[0])
    return annotation, 0 if annotation is bool else count, optional, choices


def to_flag(name: str) -> str:
    """A field's or TOML key's name as a flag: hidden_size -> --hidden-size."""
    return "--" + name.replace("_", "-")


def show_value(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, tuple):
        return " ".join(map(show_value, value))
    if value is None:
        return "none"
    text = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
    return f'"{text}"' if not text or " " in text else text


def _number(kind: type[Any], word: str) -> Any:
    if kind is str:
        return word
    try:
        return kind(word)
    except ValueError:
        return word
