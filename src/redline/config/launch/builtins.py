"""Assignments and declarations of variables, and the directives of Slurm."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from redline.config.launch.bash import Source
from redline.config.launch.expand import Expander
from redline.config.launch.shell import ARGUMENT, Notes, Scalar, Table, Variable, Words
from redline.config.launch.values import (
    Alt,
    Hole,
    Items,
    Lit,
    Place,
    Text,
    bounded,
    cut,
    known,
    render,
    unknown,
)

if TYPE_CHECKING:
    from tree_sitter import Node

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNED = re.compile(rb"(?:^|[\s;({&|])([A-Za-z_]\w*)(?:\[[^\]\s]*\])?\+?=(?!=)", re.MULTILINE)
MAX_ITEMS = 4_000


def assign_words(node: Node, expander: Expander, *, only_value: bool = False) -> tuple[str, Text]:
    """Carry out an assignment; with `only_value` (VAR=x before a command) say it without doing it.

    Returns: (name, text), ("", ()) when it assigns an array or no name.
    """
    parts = [child for child in node.children if child.type != "comment"]
    if not parts:
        return "", ()
    target = parts[0]
    name, index = _target(target, expander)
    appends = any(child.type == "+=" for child in parts)
    value = parts[-1] if len(parts) > 2 else None
    place = expander.source.place(node)
    if not name:
        return "", ()
    if value is not None and value.type == "array":
        _assign_array(name, value, expander, place, appends=appends)
        return "", ()
    text = _named(expander.text(value) if value is not None else (), name, place, expander.notes)
    if only_value:
        return name, text
    store(name, index, text, expander, place, appends=appends)
    return name, text


def store(
    name: str, index: str, text: Text, expander: Expander, place: Place, *, appends: bool = False
) -> None:
    """Give a variable, or one entry of it, a text."""
    shell, notes = expander.shell, expander.notes
    before = shell.variables.get(name)
    if index:
        _store_entry(name, index, text, before, expander)
        return
    if appends and isinstance(before, Words):
        shell.set(name, Words((*before.items, text)), notes)
        return
    if appends:
        old = shell.get(name, place, notes)
        text = bounded((*(old.text if isinstance(old, Scalar) else ()), *text), place)
    shell.set(name, Scalar(text), notes)


def _store_entry(name: str, index: str, text: Text, before: Variable | None, expander: Expander) -> None:
    if isinstance(before, Words) and index.isdecimal():
        position = int(index)
        if position < len(before.items):
            items = (*before.items[:position], text, *before.items[position + 1 :])
            expander.shell.set(name, Words(items), expander.notes)
            return
        if position == len(before.items):
            expander.shell.set(name, Words((*before.items, text)), expander.notes)
            return
    entries: dict[str, Text] = {}
    if isinstance(before, Table):
        entries |= before.entries
    elif isinstance(before, Words):
        entries |= {str(n): item for n, item in enumerate(before.items) if not isinstance(item, Alt)}
    if len(entries) < MAX_ITEMS:
        expander.shell.set(name, Table({**entries, index: text}), expander.notes)


def _target(node: Node, expander: Expander) -> tuple[str, str]:
    raw = expander.source.text(node.start_byte, node.end_byte)
    match = NAME.match(raw)
    if match is None:
        return "", ""
    if node.type != "subscript":
        return match[0], ""
    inner = [child for child in node.children[1:] if child.is_named]
    if not inner:
        return match[0], "?"
    text = known(expander.text(inner[0]))
    if text is None:
        return match[0], "?"
    value = expander.shell.variables.get(text)
    is_number = isinstance(value, Scalar) and (known(value.text) or "").isdecimal()
    return match[0], (known(value.text) or "?") if is_number and isinstance(value, Scalar) else text


def _assign_array(name: str, node: Node, expander: Expander, place: Place, *, appends: bool) -> None:
    words = expander.words(child for child in node.children if child.is_named and child.type != "comment")
    before = expander.shell.variables.get(name)
    entries = _entries(words) if not isinstance(before, Words) else {}
    if entries or isinstance(before, Table):
        old = before.entries if isinstance(before, Table) and appends else {}
        expander.shell.set(name, Table({**old, **entries}), expander.notes)
        return
    items: Items = tuple(words)
    if appends:
        items = (*_old_items(before), *items)
    if len(items) > MAX_ITEMS:
        items = (unknown(name, place, "the array grows beyond what is read."),)
    expander.shell.set(name, Words(items), expander.notes)


def _old_items(before: Variable | None) -> Items:
    if isinstance(before, Words):
        return before.items
    return (before.text,) if isinstance(before, Scalar) and before.text else ()


def _entries(words: list[Text | Alt]) -> dict[str, Text]:
    """([key]=value ...) as a table; {} when the words are not of that form."""
    found: dict[str, Text] = {}
    for word in words:
        if isinstance(word, Alt) or not word or not isinstance(word[0], Lit):
            return {}
        whole = word[0].text if "]=" in word[0].text else render(word)
        match = re.match(r"\[([^\]]*)\]=", whole)
        if match is None:
            return {}
        rest: list[Lit | Hole] = []
        skip = match.end()
        for segment in word:
            if isinstance(segment, Lit):
                kept = segment.text[skip:]
                skip = max(skip - len(segment.text), 0)
                rest += [segment._replace(text=kept)] if kept else []
            else:
                rest.append(segment)
        found[match[1].strip("\"'")] = tuple(rest)
    return found


def _named(text: Text, name: str, place: Place, notes: Notes) -> Text:
    """A variable that is nothing but an argument or the output of a command is open under its own name."""
    if len(text) == 1 and isinstance(text[0], Lit) and text[0].taken.isdecimal():  # NAME=${1:-default}
        notes.defaults.setdefault(name, notes.defaults[text[0].taken])
        return (text[0]._replace(taken=name),)
    if len(text) != 1 or not isinstance(text[0], Hole) or text[0].choices or len(text[0].names) != 1:
        return text
    hole = text[0]
    if hole.why == ARGUMENT or (hole.names[0].startswith(("$(", "`")) and not hole.harmless):
        return (replace(hole, names=(name,), place=place),)
    return text


def declare(node: Node, expander: Expander) -> None:
    """export, declare, local, readonly, typeset with their assignments."""
    shell = expander.shell
    keyword = node.children[0].type if node.children else ""
    flags = ""
    names: list[str] = []
    for child in node.children[1:]:
        if not child.is_named or child.type == "comment":
            continue
        if child.type == "variable_assignment":
            name = NAME.match(expander.source.text(child.start_byte, child.end_byte))
            if "A" in flags and name and not isinstance(shell.variables.get(name[0]), Table):
                shell.set(name[0], Table({}), expander.notes)
            if keyword == "local" and name:
                shell.local_names = shell.local_names | {name[0]}
            assign_words(child, expander)
            names += [name[0]] if name else []
            continue
        for word in expander.words([child]):
            if isinstance(word, Alt):
                continue
            shown = render(word)
            if shown.startswith(("-", "+")):
                flags += shown
            else:
                names += _declare_word(word, shown, keyword, flags, expander)
    if "n" in flags and keyword == "export":
        shell.exported.difference_update(names)
    elif keyword == "export" or "x" in flags:
        shell.exported.update(names)


def _declare_word(word: Text, shown: str, keyword: str, flags: str, expander: Expander) -> list[str]:
    """A name, or NAME=text that an expansion or quotes produced."""
    name, joined, _ = shown.partition("=")
    if not NAME.fullmatch(name):
        return []
    shell = expander.shell
    if keyword == "local":
        shell.local_names = shell.local_names | {name}
    if joined:
        place = word[0].place
        store(name, "", cut(word, len(name) + 1), expander, place)
    elif "A" in flags:
        shell.set(name, Table({}), expander.notes)
    elif keyword == "local":
        shell.set(name, Scalar(()), expander.notes)
    return [name]


# Slurm

SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-G": "gpus"}
COUNTS = frozenset(
    {"nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gpus", "cpus-per-task", "gpus-per-task", "gres"}
)


def note_assignments(source: Source, notes: Notes) -> None:
    """The variables that a script assigns anywhere: unset ones of these are empty, not the environment's."""
    notes.owned.update(match.decode() for match in ASSIGNED.findall(source.data))


def read_directives(source: Source, notes: Notes) -> None:
    """The #SBATCH lines of a script; the first of a name counts, as options given before them do."""
    if b"#SBATCH" not in source.data:
        return
    for match in re.finditer(rb"^[ \t]*#SBATCH[ \t]+(.*)$", source.data, re.MULTILINE):
        words = match[1].decode("utf-8", "replace").split("#", 1)[0].split()
        place = source.at(match.start())
        for key, value in slurm_options(words):
            notes.directives.setdefault(key, (value, place))


def slurm_options(words: list[str]) -> list[tuple[str, str]]:
    """(name, count) of the options of sbatch or srun that say how many; --gres=gpu:8 is gpus-per-node 8."""
    found: list[tuple[str, str]] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        name, joined, value = word.partition("=")
        short = SHORT.get(word[:2]) if word[:2] in SHORT and not word.startswith("--") else None
        key = short or name.removeprefix("--")
        if key not in COUNTS:
            continue
        if short:
            value = word[2:].lstrip("=")
        if not value and not joined and index < len(words):
            value = words[index]
            index += 1
        found += _count(key, value)
    return found


def _count(key: str, value: str) -> list[tuple[str, str]]:
    if key == "gres":
        match = re.search(r"gpu(?::[\w.-]+)??:(\d+)", value)
        return [("gpus-per-node", match[1])] if match else []
    if key.startswith("gpus"):
        value = value.rpartition(":")[2]
    if key == "nodes":
        value = value.rpartition("-")[2]
    return [(key, value)] if value else []


def slurm_texts(items: Items) -> list[str]:
    """Words as strings, a hole or alternative as "?"."""
    return ["?" if isinstance(item, Alt) else (known(item) or render(item) or "?") for item in items]


def take_variable(name: str, place: Place, expander: Expander, why: str) -> None:
    """A variable that a command fills with what cannot be known."""
    if NAME.fullmatch(name):
        expander.shell.set(name, Scalar(unknown(name, place, why)), expander.notes)
