"""`read_launch`: one path to a `Launch`, whatever kind of file it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from redline.config.flags import to_flag
from redline.config.launch.attribute import Attributed, attribute
from redline.config.launch.bash import source_of_file
from redline.config.launch.files import read_run_folder, read_toml, read_yaml, yaml_into
from redline.config.launch.launch import Assumption, Launch, is_redline
from redline.config.launch.megatron_names import NODE_KEYS, PROCESS_KEYS
from redline.config.launch.nearby import beside
from redline.config.launch.run import read_program
from redline.config.launch.shell import Command, Notes, Scalar, Shell, Words
from redline.config.launch.values import Alt, Hole, Items, Lit, Place, Text, holes, known, lit, render, split
from redline.config.launch.vocabulary import SETUP_FILES
from redline.config.launch.wrappers import TRAINER, Processes, exported, find_entry, processes
from redline.config.layers import Layer, found, merge, preset_of
from redline.config.model import REQUIRED_FIELDS
from redline.config.presets import PRESETS
from redline.config.problems import Problem, suggestion
from redline.config.tree import RunConfig, with_values
from redline.errors import DataError

NO_VALUES: Mapping[str, str] = {}
MAX_LISTED = 200
FACTS = ("nnodes", "nproc_per_node", "world_size")


def read_launch(path: Path, *, set_values: Mapping[str, str] = NO_VALUES) -> Launch:
    """A launch script, TOML or YAML config, or run folder, as far as its files tell. Nothing is executed.

    Args:
        set_values: values of `--set`: variables of the script, or "1", "2", ... for its arguments.

    Raises: DataError when the file cannot be read or holds no training command; ConfigError for a TOML file
        that is none. What is wrong with the options themselves is in `Launch.problems`.
    """
    path = Path(path)
    if path.is_dir():
        return read_run_folder(path, partial(finish, own=True))
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return read_toml(path, partial(finish, own=True))
    if suffix in (".yaml", ".yml"):
        return read_yaml(path, finish, set_values)
    return _read_bash(path, set_values)


def finish(
    layer: Layer, open_fields: Iterable[str] = (), *, own: bool = False
) -> tuple[RunConfig, frozenset[str], list[Problem]]:
    """(config, stated fields, problems) of the values that were found; nothing is raised.

    Args:
        own: they are for `redline train`, which trains the demo where no model is named.
    """
    problems = list(layer.problems)
    named = layer.values | dict.fromkeys(open_fields)
    preset = preset_of(named) if own else layer.values.get("preset")
    if preset is not None and preset not in PRESETS:
        mend = suggestion(str(preset), PRESETS, f"the presets are {', '.join(PRESETS)}.")
        problems.append(
            Problem("unknown-preset", f"--preset {preset}: there is no such preset.", "", mend, ("--preset",))
        )
    preset_values = {"preset": preset, **PRESETS.get(str(preset), {})} if preset in PRESETS else {}
    config = with_values(RunConfig(), merge(preset_values, layer.values))
    stated = frozenset(layer.values)
    missing = [name for name in REQUIRED_FIELDS if name not in stated and name not in set(open_fields)]
    if missing and not preset and not layer.values.get("use_checkpoint_args"):
        flags = tuple(map(to_flag, missing))
        what = f"the model's shape is incomplete: {' and '.join(flags)} not given."
        mend = "give them; a value that a variable holds can be given by --set."
        problems.append(
            Problem("shape-stated", what, "layers, hidden size and heads are required.", mend, flags)
        )
    unsure = {to_flag(name) for name in open_fields}
    broken = found(config, problems, explicit=stated, training=False)
    problems += [problem for problem in broken if not unsure.intersection(problem.flags)]
    return config, stated, problems


@dataclass(slots=True)
class _Candidate:
    """A command that may be the training."""

    command: Command
    entry: str | None
    at: int
    flags: Attributed


def _read_bash(path: Path, set_values: Mapping[str, str]) -> Launch:
    source, text = source_of_file(path)
    pinned = {name.removeprefix("$").strip("{}"): value for name, value in set_values.items()}
    notes = Notes(pinned, path)
    notes.look_at_line_ends(path, text)
    shell = read_program(source, notes)
    candidates = _candidates(notes, shell)
    if not candidates:
        why = "no command starts a Python program with Megatron's flags, and no variable holds such flags."
        mend = "name the script that starts the training, or the file that holds its flags."
        if notes.stopped:
            line = notes.stopped.line
            why = f"reading stopped at line {line}: what the script does there has no end in sight."
        elif notes.left and shell.dead == "exit":
            why = f"it ends by the exit at {notes.left.file.name}:{notes.left.line} before it starts any."
            mend = "settle what leads there by --set NAME=VALUE, or name the script that starts the training."
        raise DataError(f"{path} holds no training command.", why, mend)
    best = max(candidates, key=lambda candidate: candidate.flags.understood)
    running = processes(best.command, best.at, notes) if best.entry else Processes()
    _trainer_counts(best.flags, running)
    _yaml_config(best.flags, notes)
    ledger = _Assumptions(notes)
    ledger.flags(best.flags)
    ledger.facts(running)
    environment = ledger.environment(exported(best.command, best.at))
    ledger.others(best, candidates)
    ledger.rest(best.flags)
    open_fields = {use.field for use in best.flags.uses if use.field and best.flags.doubts.get(use.flag)}
    open_fields -= set(best.flags.layer.values)
    config, stated, problems = finish(best.flags.layer, open_fields, own=is_redline(best.entry))
    problems += [*_unused(pinned, notes), *_line_ends(notes)]
    return Launch(
        "bash",
        path,
        config,
        stated,
        tuple(best.flags.uses),
        environment,
        running.world_size,
        running.nnodes,
        running.nproc_per_node,
        running.launcher,
        best.entry,
        ledger.listed(),
        tuple(dict.fromkeys(problems)),
        text,
        tuple(use for place, words in notes.cut_off.items() for use in attribute(words, place).uses),
    )


def _candidates(notes: Notes, shell: Shell) -> list[_Candidate]:
    found_: list[_Candidate] = []
    seen: dict[object, Attributed] = {}
    for command in notes.commands:
        entry = find_entry(command.items)
        if entry is None:
            continue
        rest = command.items[entry[0] + 1 :]
        if is_redline(entry[1]) and rest and not isinstance(rest[0], Alt) and render(rest[0]) == "train":
            rest = rest[1:]  # the verb
        if rest not in seen:
            seen[rest] = attribute(rest, command.place)
        flags = seen[rest]
        if flags.understood or "train" in entry[1]:
            found_.append(_Candidate(command, entry[1], entry[0], flags))
    if any(candidate.flags.understood for candidate in found_):
        return found_
    fragment = _fragment(shell, notes)
    return [*found_, fragment] if fragment else found_


def _fragment(shell: Shell, notes: Notes) -> _Candidate | None:
    """A file that only sets variables for another: all flags that its variables hold."""
    items: list[Items] = []
    for value in shell.variables.values():
        if isinstance(value, Words):
            items.append(value.items)
        elif isinstance(value, Scalar) and render(value.text).lstrip().startswith("--"):
            items.append(tuple(split(value.text)))
    place = Place(notes.script, 1)
    words = tuple(word for row in items for word in row)
    flags = attribute(words, place)
    if not flags.understood:
        return None
    return _Candidate(Command(words, shell, {}, place), None, 0, flags)


def _trainer_counts(flags: Attributed, running: Processes) -> None:
    """Nodes and devices of NeMo's trainer section, where plain Python starts what starts the rest."""
    if running.launcher not in (None, "python"):
        return
    counts = {
        use.flag.rpartition(".")[2]: int(use.value or 0)
        for use in flags.uses
        if use.flag.startswith("trainer.") and (use.value or "").isdecimal()
    }
    each = next((counts[key] for key in PROCESS_KEYS if key in counts), None)
    if each is None:
        return
    nodes = next((counts[key] for key in NODE_KEYS if key in counts), 1)
    running.nnodes, running.nproc_per_node, running.world_size = nodes, each, nodes * each


def _yaml_config(flags: Attributed, notes: Notes) -> None:
    """--yaml-cfg FILE: options of a file beside the script; what stands on the command line counts more."""
    for use in list(flags.uses):
        if use.flag != "--yaml-cfg" or not use.value:
            continue
        path = beside(lit(use.value, Place(use.file, use.line)), notes)
        if path is None:
            notes.skipped.setdefault(use.value, (Place(use.file, use.line), "it is not beside the script."))
        else:
            yaml_into(path, flags, notes.pinned)


def _unused(pinned: Mapping[str, str], notes: Notes) -> list[Problem]:
    return [
        Problem(
            "set-without-effect",
            f"--set {name}={value} has no effect.",
            "the script never reads that variable.",
            suggestion(name, notes.asked, "name one of the assumptions that are listed."),
        )
        for name, value in pinned.items()
        if name not in notes.asked
    ]


def _line_ends(notes: Notes) -> list[Problem]:
    return [
        Problem(
            "unix-line-ends",
            f"the lines of {path} end in CR LF.",
            "bash ends a line at LF alone: the CR is a part of the last word, and a backslash before it "
            "continues no command.",
            f"write it with LF line ends, for example by `dos2unix {path.name}`.",
        )
        for path in notes.returns
    ]


@dataclass(slots=True)
class _Entry:
    """An assumption that is still growing."""

    place: Place
    why: str
    used_by: dict[str, None] = field(default_factory=dict)
    choices: dict[str, None] = field(default_factory=dict)


class _Assumptions:
    """Gathers what is open, by name."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.entries: dict[str, _Entry] = {}

    def add(self, name: str, place: Place, why: str, used_by: str | None = None) -> _Entry:
        entry = self.entries.setdefault(name, _Entry(place, why))
        if used_by:
            entry.used_by[used_by] = None
        return entry

    def hole(self, hole: Hole, used_by: str | None) -> None:
        for inner in holes((hole,)):
            if inner.harmless:
                continue
            for name in inner.names:
                self.add(name, inner.place, inner.why, used_by)

    def took(self, name: str, used_by: str) -> None:
        if name in self.notes.taken:
            value, place, why = self.notes.taken[name]
            self.add(name, place, why, used_by).choices[value] = None

    def flags(self, flags: Attributed) -> None:
        for flag, doubtful in flags.doubts.items():
            for hole in doubtful:
                self.hole(hole, flag)
        for flag, names in flags.taken.items():
            for name in names:
                self.took(name, flag)

    def facts(self, running: Processes) -> None:
        for fact in FACTS:
            for hole in running.doubts.get(fact, ()):
                if getattr(running, fact) is None:
                    self.hole(hole, fact)
            for name in running.taken.get(fact, ()):
                self.took(name, fact)

    def environment(self, variables: Mapping[str, tuple[Text, Place]]) -> dict[str, tuple[str, Place]]:
        """The variables that are known; the others become assumptions."""
        sure: dict[str, tuple[str, Place]] = {}
        for name, (text, place) in variables.items():
            doubtful = [hole for hole in text if isinstance(hole, Hole) and hole.choices]
            if not doubtful:
                sure[name] = (render(text), place)
            for hole in doubtful:
                self.hole(hole, name)
            for segment in text:
                if isinstance(segment, Lit) and segment.taken:
                    self.took(segment.taken, name)
        return sure

    def others(self, best: _Candidate, candidates: list[_Candidate]) -> None:
        """Commands that were not chosen, and the conditions and loops around the chosen one."""
        for name in best.command.shell.conditions:
            self.add(name, best.command.place, "it decides which training command runs.")
        here = best.command.place
        rounds = {c.command.items for c in candidates if c.command.place == here}
        for name, words, place in best.command.shell.loops if len(rounds) > 1 else ():
            entry = self.add(name, place, "a loop gives it several values; the first is read.")
            values = [known(word) for word in words if isinstance(word, tuple)]
            entry.choices |= dict.fromkeys(value for value in values if value is not None)
        listed = {here}
        for other in candidates:
            place = other.command.place
            is_training = other.flags.understood >= 5 or (other.entry and TRAINER.search(other.entry))
            if place in listed or not other.flags.uses or not is_training:
                continue
            listed.add(place)
            count = len(other.flags.uses)
            why = f"{other.entry} with {count} flags is started too; the richest command is read."
            self.add(f"command at line {place.line}", place, why)

    def rest(self, flags: Attributed) -> None:
        """What may hold further flags, what was taken as unset, what is not here, where reading stopped."""
        for hole in flags.loose:
            for name in hole.names:
                self.add(name, hole.place, "it may hold further flags.")
        for name, place in self.notes.presumed.items():
            self.add(name, place, "the script never sets it; it is taken as unset.")
        for name, (value, place) in self.notes.defaults.items():
            if self.notes.compared.get(name, {}).keys() - {value}:
                why = "nothing sets it: its default is taken; the script speaks of others too."
                self.add(name, place, why).choices[value] = None
        for name, (place, why) in self.notes.skipped.items():
            if name.rpartition("/")[2] not in SETUP_FILES:
                self.add(name, place, f"this file is not read: {why}")
        if self.notes.stopped:
            self.add("the rest of the script", self.notes.stopped, "it goes on longer than is read.")

    def listed(self) -> tuple[Assumption, ...]:
        rows = []
        for name, entry in list(self.entries.items())[:MAX_LISTED]:
            compared = self.notes.compared.get(name, {})
            choices = tuple(dict.fromkeys((*entry.choices, *compared)))
            rows.append(
                Assumption(name, entry.place.file, entry.place.line, entry.why, tuple(entry.used_by), choices)
            )
        return tuple(rows)
