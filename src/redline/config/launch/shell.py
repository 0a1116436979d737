"""The state of a shell that is only imagined: variables, functions, files written by heredocs; and notes.

`Shell` is copied where a condition cannot be known, each branch is read on its own copy, and `join` makes one
shell of them again: what differs becomes text with choices. `Notes` is shared by all copies: what conditions
compared, what was taken as given, which commands would have run, and the budget of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from redline.config.launch.bash import Source
from redline.config.launch.values import (
    Alt,
    Hole,
    Item,
    Items,
    Lit,
    Place,
    Text,
    lit,
    merge,
    merge_items,
    unknown,
)
from redline.config.launch.vocabulary import PLACES

if TYPE_CHECKING:
    from tree_sitter import Node

ARGUMENT = "it is an argument of the script."
ENVIRONMENT = (
    "it comes from the environment.",
    "the script never sets it: it comes from the environment.",
)
COUNT = "#"  # the number of arguments, 0 as far as the script alone tells
CALCULATED = "it is calculated from what is not known."
MAX_STEPS = 60_000  # words and statements; a 500-line script takes about 3,000

Array = tuple[Item, ...]


class StopError(Exception):
    """The budget of steps is spent; what was found so far counts."""


class OpenError(Exception):
    """A value that arithmetic needs is a hole; `names` decide it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.names = names


@dataclass(frozen=True, slots=True)
class Scalar:
    """A variable's one text."""

    text: Text


@dataclass(frozen=True, slots=True)
class Words:
    """An indexed array."""

    items: Items


@dataclass(frozen=True, slots=True)
class Table:
    """An associative array (or an indexed one filled by subscript)."""

    entries: Mapping[str, Text]


Variable = Scalar | Words | Table


@dataclass(frozen=True, slots=True)
class Function:
    """A shell function: its body, where that was read."""

    source: Source
    body: Node


@dataclass(frozen=True, slots=True)
class Command:
    """A command that would run: its words after every expansion, in the shell as it was then."""

    items: Items
    shell: Shell
    inline: Mapping[str, tuple[Text, Place]]  # VAR=x before the command
    place: Place


@dataclass(slots=True)
class Notes:
    """What all copies of the shell share."""

    pinned: Mapping[str, str]
    script: Path
    steps: int = 0
    stopped: Place | None = None
    left: Place | None = None  # the last `exit`
    asked: set[str] = field(default_factory=set)  # variables that were read
    owned: set[str] = field(default_factory=set)  # variables that the script assigns somewhere
    compared: dict[str, dict[str, Place]] = field(
        default_factory=dict
    )  # name -> literals it is compared with
    presumed: dict[str, Place] = field(default_factory=dict)  # toggles taken as unset
    taken: dict[str, tuple[str, Place, str]] = field(default_factory=dict)  # name -> value, place, why
    defaults: dict[str, tuple[str, Place]] = field(default_factory=dict)  # ${NAME:-default}
    skipped: dict[str, tuple[Place, str]] = field(default_factory=dict)  # sourced files that are not here
    commands: list[Command] = field(default_factory=list)
    cut_off: dict[Place, Items] = field(default_factory=dict)  # commands that are only flags
    returns: list[Path] = field(default_factory=list)  # files whose lines end in CR LF
    directives: dict[str, tuple[str, Place]] = field(default_factory=dict)  # #SBATCH options
    open_files: list[Path] = field(default_factory=list)  # scripts being read, innermost last

    def spend(self, place: Place, steps: int = 1) -> None:
        """Count work.

        Raises: StopError once the budget is spent.
        """
        self.steps += steps
        if self.steps > MAX_STEPS:
            self.stopped = self.stopped or place
            raise StopError

    def look_at_line_ends(self, path: Path, text: str) -> None:
        """Remember a file whose lines end as bash does not take them."""
        if "\r\n" in text and path not in self.returns:
            self.returns.append(path)

    def compare(self, names: tuple[str, ...], literal: str, place: Place) -> None:
        """Remember that a condition compares something decided by `names` with `literal`."""
        if literal and len(literal) <= 80:
            for name in names:
                self.compared.setdefault(name, {}).setdefault(literal, place)

    def take(self, name: str, value: str, place: Place, why: str) -> Text:
        """A value that stands in for a variable of the environment, remembered as an assumption."""
        self.taken.setdefault(name, (value, place, why))
        return lit(value, place, name)

    def compare_default(self, text: Text, literal: str, place: Place) -> None:
        """The same of a text that is the default of ${NAME:-default}: its other values are choices."""
        names = {part.taken for part in text if isinstance(part, Lit) and part.taken in self.defaults}
        self.compare(tuple(names), literal, place)

    def take_directive(self, key: str, value: str, place: Place) -> Text:
        """A number of the #SBATCH lines, remembered under the variable by which --set changes it."""
        why = f"#SBATCH --{key} says {value}; an option of sbatch or srun would override it."
        name = VARIABLE_OF.get(key, f"#SBATCH --{key}")
        return lit(value, place) if name in self.pinned else self.take(name, value, place, why)


@dataclass(slots=True)
class Shell:
    """One imagined shell.

    Attributes:
        args: words of "$@" inside a function or a script called with words; None for the script as launched.
        dead: "" while it runs, else what ended it: "exit", "return", "break" or "continue".
        conditions: the names that decide whether this shell is ever reached.
        loops: the loops it is in: variable, its words, place.
        local_names: what `local` declared in the function being read.
        shifted: how often `shift` moved the unknown arguments of the script.
        prefix, around: words, and VAR=x, of the launchers that started this shell (srun, mpirun).
    """

    name: Text
    variables: dict[str, Variable] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Function] = field(default_factory=dict)
    files: dict[str, Text] = field(default_factory=dict)
    args: Items | None = None
    dead: str = ""
    export_all: bool = False
    conditions: tuple[str, ...] = ()
    loops: tuple[tuple[str, Items, Place], ...] = ()
    local_names: frozenset[str] = frozenset()
    shifted: int = 0
    prefix: Items = ()
    around: Mapping[str, tuple[Text, Place]] = field(default_factory=dict)

    def copy(self) -> Shell:
        """An independent shell in the same state."""
        return Shell(
            self.name,
            dict(self.variables),
            set(self.exported),
            dict(self.functions),
            dict(self.files),
            self.args,
            self.dead,
            self.export_all,
            self.conditions,
            self.loops,
            self.local_names,
            self.shifted,
            self.prefix,
            self.around,
        )

    def become(self, other: Shell) -> None:
        """Take over the state of `other`."""
        self.variables, self.exported = other.variables, other.exported
        self.functions, self.files = other.functions, other.files
        self.args, self.dead, self.export_all = other.args, other.dead, other.export_all
        self.local_names, self.shifted = other.local_names, other.shifted

    def get(self, name: str, place: Place, notes: Notes) -> Variable | None:
        """A variable as a value of --set, the script or the batch system gives it; None when nothing does."""
        notes.asked.add(name)
        if name in notes.pinned:
            return Scalar(lit(notes.pinned[name], place))
        if name in self.variables:
            return self.variables[name]
        given = batch_value(name, notes)
        return Scalar(given) if given is not None else None

    def set(self, name: str, value: Variable, notes: Notes) -> None:
        """Assign, unless --set has the last word."""
        if name in notes.pinned:
            notes.asked.add(name)
            return
        self.variables[name] = value
        if self.export_all:
            self.exported.add(name)


def environment_text(name: str, place: Place) -> Text:
    """A variable that only the environment can give."""
    if name in PLACES or name.endswith(("_DIR", "_HOME", "_ROOT", "_NODELIST")):
        return unknown(name, place, ENVIRONMENT[0], harmless=True)
    return unknown(name, place, ENVIRONMENT[1])


# Variables of the batch system: the directive that gives each.
BATCH: dict[str, str] = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_TASKS_PER_NODE": "ntasks-per-node",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NPROCS": "ntasks",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
    "SLURM_GPUS": "gpus",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
VARIABLE_OF = {key: name for name, key in reversed(BATCH.items())}  # the first variable of each directive


def batch_value(name: str, notes: Notes) -> Text | None:
    """What #SBATCH directives say of a SLURM_* variable."""
    if name not in BATCH:
        return None
    found = directive(BATCH[name], notes)
    return None if found is None else notes.take_directive(BATCH[name], *found)


def directive(key: str, notes: Notes) -> tuple[str, Place] | None:
    """A number that the directives state, or that follows from two of them."""
    variable = VARIABLE_OF.get(key, "")
    if variable in notes.pinned:
        notes.asked.add(variable)
        return notes.pinned[variable], Place(notes.script, 1)
    if key in notes.directives:
        return notes.directives[key]
    products = {"ntasks": ("nodes", "ntasks-per-node"), "gpus": ("nodes", "gpus-per-node")}
    parts = [directive(part, notes) for part in products.get(key, ())]
    if parts and all(parts):
        (first, place), (second, _) = (part for part in parts if part)
        if first.isdecimal() and second.isdecimal():
            return str(int(first) * int(second)), place
    return None


def join(shell: Shell, branches: list[Shell], names: tuple[str, ...], place: Place, why: str) -> None:
    """Make `shell` what it can be after its branches; those that left the script no longer count.

    A branch that broke out of a loop or returned counts as one that went on: what it set may be in force.
    """
    alive = [branch for branch in branches if branch.dead != "exit"]
    if not alive:
        shell.become(branches[0])
        return
    if len(alive) == 1:
        shell.become(alive[0])
        return
    ends = {branch.dead for branch in alive}
    merged = alive[0].copy()
    merged.dead = alive[0].dead if len(ends) == 1 else ""
    every: dict[str, None] = {}
    for branch in alive:
        every |= dict.fromkeys(branch.variables)
        merged.exported |= branch.exported
        merged.local_names |= branch.local_names
        merged.functions |= branch.functions
        merged.files |= branch.files
    for name in every:
        values = [branch.variables.get(name) for branch in alive]
        if any(value is not values[0] for value in values):
            merged.variables[name] = _joined(name, values, names, place, why)
    shell.become(merged)


def _joined(
    name: str, values: list[Variable | None], names: tuple[str, ...], place: Place, why: str
) -> Variable:
    if any(isinstance(value, Table) for value in values):
        keys: dict[str, None] = {}
        tables = [value.entries if isinstance(value, Table) else {} for value in values]
        for table in tables:
            keys |= dict.fromkeys(table)
        return Table({key: merge([t.get(key, ()) for t in tables], names, place, why) for key in keys})
    if any(isinstance(value, Words) for value in values):
        return Words(merge_items([_items(value) for value in values], names, place, why))
    texts = [value.text if isinstance(value, Scalar) else () for value in values]
    if name.startswith("SLURM_") and () in texts:
        texts = [text or environment_text(name, place) for text in texts]
    return Scalar(merge(texts, names, place, why))


def _items(value: Variable | None) -> Items:
    if isinstance(value, Words):
        return value.items
    return (value.text,) if isinstance(value, Scalar) and value.text else ()


def segments(items: Items) -> list[Lit | Hole]:
    """Every segment of some words, those of alternatives too."""
    found: list[Lit | Hole] = []
    for item in items:
        if isinstance(item, Alt):
            for stream in item.streams:
                found += segments(stream)
        else:
            found += item
    return found
