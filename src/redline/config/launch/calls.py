"""Commands that matter to the reading: builtins, and programs that are handed a script or a text to run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from redline.config.launch.arithmetic import ArithmeticFaultError
from redline.config.launch.builtins import slurm_options, slurm_texts, store, take_variable
from redline.config.launch.conditions import Answer
from redline.config.launch.shell import OpenError, Words
from redline.config.launch.values import (
    Alt,
    Hole,
    Items,
    Lit,
    Place,
    Text,
    cut,
    known,
    lines_of,
    lit,
    names_of,
    render,
)
from redline.config.launch.vocabulary import PREFIXES, SHELLS, SILENT

if TYPE_CHECKING:
    from redline.config.launch.run import Reader

Inline = dict[str, tuple[Text, Place]]
ENDS = {"exit": "exit", "return": "return", "break": "break", "continue": "continue"}


def hand_over(
    reader: Reader,
    first: str | None,
    items: Items,
    inline: Inline,
    place: Place,
    given: Text | None,
    target: Text | None,
) -> Answer | None:
    """Deal with a command that acts on the reading; None when it is only a command line to note."""
    if first is None:
        return _carried(reader, items, inline, place)
    if first in ENDS:
        if first == "exit":
            reader.notes.left = place
        reader.shell.dead = ENDS[first]
        return Answer(True)
    if first == "false":
        return Answer(False)
    if first in ("cat", "tee"):
        return _write(reader, first, items, given, target)
    if first in SILENT:
        return Answer(True)
    act = BUILTINS.get(first)
    if act is not None:
        return act(reader, items, inline, place, given)
    program = first.rpartition("/")[2]
    if program in SHELLS:
        return _shell(reader, items, inline, place, given)
    if program == "sbatch":
        return _sbatch(reader, items, inline, place, given)
    return _carried(reader, items, inline, place)


def _write(reader: Reader, first: str, items: Items, given: Text | None, target: Text | None) -> Answer:
    """cat > file <<EOF, tee file <<EOF."""
    if first == "tee" and target is None:
        names = [item for item in items[1:] if not isinstance(item, Alt) and not render(item).startswith("-")]
        target = names[0] if names else None
    if given is not None and target is not None:
        reader.shell.files[render(target)] = given
    return Answer(True)


def _eval(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    reader.read_text(reader.expander.joined(items[1:], place), place, apart=False)
    return Answer(True)


def _exec(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    if len(items) > 1:
        reader.call(items[1:], inline, place, given)
        reader.shell.dead = "exit"
    return Answer(True)


def _prefix(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    """A word before the real command: nohup, time -p, nice -n 5."""
    rest = items[1:]
    while rest and not isinstance(rest[0], Alt) and re.match(r"-|\d+$", known(rest[0]) or ""):
        rest = rest[1:]
    return reader.call(rest, inline, place, given) if rest else Answer(True)


def _env(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    """env [-i] [-u NAME] NAME=text ... command."""
    set_here = dict(inline)
    index = 1
    while index < len(items):
        item = items[index]
        if isinstance(item, Alt):
            break
        shown = render(item)
        match = re.match(r"([A-Za-z_]\w*)=", shown)
        if match:
            set_here[match[1]] = (cut(item, match.end()), item[0].place)
        elif shown in ("-u", "--unset"):
            index += 1
        elif not shown.startswith("-"):
            break
        index += 1
    return reader.call(items[index:], set_here, place, given) if index < len(items) else Answer(True)


def _source(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    if len(items) > 1 and not isinstance(items[1], Alt):
        reader.read_script(items[1], items[2:], place, sourced=True)
    return Answer(True)


def _set(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    words = slurm_texts(items)
    if "--" in words:
        reader.shell.args = items[words.index("--") + 1 :]
    for number, word in enumerate(words):
        named = word in ("-o", "+o") and words[number + 1 : number + 2] == ["allexport"]
        if named or re.fullmatch(r"[-+][a-zA-Z]*a[a-zA-Z]*", word):
            reader.shell.export_all = word[0] == "-"
    return Answer(True)


def _shift(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    word = slurm_texts(items[1:2])
    count = int(word[0]) if word and word[0].isdecimal() and len(word[0]) < 5 else 1
    if reader.shell.args is None:
        reader.shell.shifted += count
        return Answer(True)
    enough = len(reader.shell.args) >= count
    reader.shell.args = reader.shell.args[count:] if enough else reader.shell.args
    return Answer(enough)


def _let(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    value = 0
    for item in items[1:]:
        if isinstance(item, Alt):
            return Answer(None, item.names)
        try:
            value = reader.expander.calculate(item, place)
        except OpenError as unsure:
            return Answer(None, unsure.names)
        except ArithmeticFaultError:
            return Answer(None, names_of(item) or ("let ...",))
    return Answer(value != 0)


def _read(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    """read NAME <<EOF, mapfile NAME <<EOF; without a heredoc the name holds what cannot be known."""
    words = slurm_texts(items)
    names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
    if not names:
        return Answer(None, ("read ...",))
    if given is not None and words[0] == "read":
        store(names[-1], "", given, reader.expander, place)
        return Answer(True)
    if given is not None:
        reader.shell.set(names[-1], Words(lines_of(given)), reader.notes)
        return Answer(True)
    for name in names:
        take_variable(name, place, reader.expander, "a command reads it in.")
    return Answer(None, ("read ...",))


def _printf(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    """printf -v NAME format words: %s and %d take a word each; other formats are not followed."""
    words = [None if isinstance(item, Alt) else known(item) for item in items]
    if len(words) < 4 or words[1] != "-v" or not words[2]:
        return Answer(True)
    form, rest = words[3], words[4:]
    fields = len(re.findall(r"%[sd]", form or ""))
    if form is None or None in rest or not fields == form.count("%") == len(rest):
        take_variable(words[2], place, reader.expander, "printf composes it.")
        return Answer(True)
    row = iter(rest)
    text = re.sub(r"%[sd]", lambda _: str(next(row)), form)
    store(words[2], "", lit(text, place), reader.expander, place)
    return Answer(True)


def _getopts(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    return Answer(False)  # the script as launched has no options


Builtin = Callable[["Reader", Items, Inline, Place, "Text | None"], Answer]
BUILTINS: dict[str, Builtin] = {
    "eval": _eval,
    "exec": _exec,
    "env": _env,
    "source": _source,
    ".": _source,
    "set": _set,
    "shift": _shift,
    "let": _let,
    "read": _read,
    "mapfile": _read,
    "readarray": _read,
    "printf": _printf,
    "getopts": _getopts,
    **dict.fromkeys(PREFIXES, _prefix),
}


def _shell(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    """bash -c text, bash script, bash <<EOF."""
    index = 1
    while index < len(items):
        item = items[index]
        if isinstance(item, Alt):
            break
        shown = render(item)
        if re.fullmatch(r"-[a-zA-Z]*c", shown):
            return _text(reader, items[index + 1 :], inline, place)
        if shown in ("-o", "+o", "--rcfile", "--init-file"):
            index += 1
        elif not shown.startswith(("-", "+")):
            with _Within(reader, (), inline):
                reader.read_script(item, items[index + 1 :], place, sourced=False)
            return Answer(True)
        index += 1
    if given is not None:
        with _Within(reader, (), inline):
            reader.read_text(given, place, apart=True)
    return Answer(True)


def _text(reader: Reader, items: Items, inline: Inline, place: Place, prefix: Items = ()) -> Answer:
    """The text after -c, with the words after it as $0, $1, ..."""
    while items and not isinstance(items[0], Alt) and re.fullmatch(r"-[a-z]+", render(items[0])):
        items = items[1:]  # bash -c -x text
    if items and not isinstance(items[0], Alt):
        with _Within(reader, prefix, inline):
            reader.read_text(items[0], place, items[2:], apart=True)
    return Answer(True)


def _sbatch(reader: Reader, items: Items, inline: Inline, place: Place, given: Text | None) -> Answer:
    """sbatch [options] script [words], sbatch --wrap text, sbatch <<EOF."""
    words = slurm_texts(items)
    for key, value in slurm_options(words[1:]):
        reader.notes.directives[key] = (value, place)
    with _Within(reader, (), inline):
        for index, word in enumerate(words[1:], 1):
            item = items[index]
            if isinstance(item, Alt):
                continue
            if word == "--wrap" and index + 1 < len(items):
                following = items[index + 1]
                reader.read_text(() if isinstance(following, Alt) else following, place, apart=True)
                return Answer(True)
            if word.startswith("--wrap="):
                reader.read_text(cut(item, len("--wrap=")), place, apart=True)
                return Answer(True)
            if not word.startswith("-") and reader.read_script(
                item, items[index + 1 :], place, sourced=False
            ):
                return Answer(True)
        if given is not None:
            reader.read_text(given, place, apart=True)
    return Answer(True)


class _Within:
    """The words of a launcher, and VAR=x, around what it launches."""

    def __init__(self, reader: Reader, prefix: Items, inline: Inline) -> None:
        self.reader, self.prefix, self.inline = reader, prefix, inline

    def __enter__(self) -> None:
        shell = self.reader.shell
        self.before = shell.prefix, shell.around
        shell.prefix = (*shell.prefix, *self.prefix)
        shell.around = {**shell.around, **self.inline}

    def __exit__(self, *_: object) -> None:
        self.reader.shell.prefix, self.reader.shell.around = self.before


def _carried(reader: Reader, items: Items, inline: Inline, place: Place) -> Answer | None:
    """A launcher (srun, mpirun, docker, ssh, ...) whose words hold a shell with text, or a script."""
    words = ["" if isinstance(item, Alt) else render(item) for item in items]
    for index, word in enumerate(words[:200]):
        program = word.rpartition("/")[2]
        if program.endswith(".py") and index:
            return None
        if program in SHELLS and index + 1 < len(words):
            later = next(
                (n for n in range(index + 1, min(index + 6, len(words))) if not words[n].startswith("-")), 0
            )
            flags = words[index + 1 : later] if later else words[index + 1 :]
            if any(re.fullmatch(r"-[a-zA-Z]*c", flag) for flag in flags):
                start = next(
                    n for n in range(index + 1, len(words)) if re.fullmatch(r"-[a-zA-Z]*c", words[n])
                )
                return _text(reader, items[start + 1 :], inline, place, items[:index])
            continue
        item = items[index]
        if word.endswith((".sh", ".slurm", ".sbatch", ".bash")) and not isinstance(item, Alt):
            noted = len(reader.notes.commands)
            with _Within(reader, items[:index], inline):
                reader.read_script(item, items[index + 1 :], place, sourced=False)
            if len(reader.notes.commands) > noted:
                return Answer(True)
    if words and words[0].rpartition("/")[2] in ("ssh", "pdsh", "clush"):
        return _remote(reader, items, words, inline, place)
    return None


def _remote(reader: Reader, items: Items, words: list[str], inline: Inline, place: Place) -> Answer | None:
    """ssh [options] host text: the last word, or the words after the host."""
    start = next((n for n in range(1, len(words)) if " " in words[n]), 0)
    if not start:
        return None
    row: list[Lit | Hole] = list(reader.expander.joined(items[start:], place))
    with _Within(reader, (), inline):
        reader.read_text(tuple(row), place, apart=True)
    return Answer(True)
