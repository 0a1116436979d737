"""The command line: `parse_args`.

Its own few lines rather than argparse: every flag comes from the tree, abbreviations do not exist, and all
mistakes are reported together, each with the nearest name.
"""

from __future__ import annotations

from collections.abc import Sequence

from redline.config.flags import MANY, UNSET, Spelling, to_flag
from redline.config.layers import Layer, Parsed, resolve
from redline.config.problems import Problem, nearest, suggestion
from redline.config.toml import read_layer
from redline.config.tree import spellings

SEE_HELP = "--help-all lists every flag."


def parse_args(argv: Sequence[str], *, training: bool = True) -> Parsed:
    """The configuration of `[CONFIG.toml] [--flags]`.

    Flags override the file, the file overrides the preset. A value may follow its flag or be joined by "=".
    Lists take words up to the next flag. "none" unsets an option that can be unset.

    Args:
        argv: the words after the verb.
        training: whether it must be possible to train with the result now (see layers.resolve).

    Raises: InvalidConfigError (exit code 2) with every unknown flag, stray word, bad value, refused option
        and broken rule.
    """
    flags = Layer()
    files = read_words(list(argv), flags)
    if len(files) > 1:
        what = f"{len(files)} config files were given: {', '.join(files)}."
        flags.problems.append(
            Problem("one-config-file", what, "a run has one.", "keep one and give the rest as flags.")
        )
    file = read_layer(files[0]) if files else Layer()
    return resolve(file, flags, training=training)


def read_words(words: list[str], layer: Layer) -> list[str]:
    """Gather flags into `layer`; returns the config files among the words."""
    known = spellings()
    files: list[str] = []
    after = ""  # the switch or complete option that the word follows, for the explanation of a stray word
    while words:
        word = words.pop(0)
        name, joined, value = word.partition("=")
        if is_config(word):
            files.append(word)
        elif not is_flag(word):
            layer.problems.append(_stray(word, after))
            take_values(words, MANY)
        elif name not in known:
            layer.problems.append(_unknown(name))
            take_values(words, MANY)
        else:
            _read_flag(name, known[name], [value] if joined else None, words, layer)
            after = name
    return files


def _read_flag(
    name: str, spelling: Spelling, joined: list[str] | None, words: list[str], layer: Layer
) -> None:
    option = spelling.option
    if spelling.constant is not UNSET:
        if joined:
            what, why = f"{name}={joined[0]}: {name} takes no value.", "it is a switch."
            mend = f"write {name} alone."
            layer.problems.append(Problem("takes-no-value", what, why, mend, (option.flag,)))
        else:
            layer.put(name, spelling, spelling.constant)
        return
    values = joined or take_values(words, option.count)
    if not values or (option.count > 1 and len(values) != option.count and values != ["none"]):
        wanted = (
            "at least one value"
            if option.count == MANY
            else f"{option.count} value{'s' * (option.count > 1)}"
        )
        what, why = f"{name} needs {wanted} and has {len(values)}.", f"it means: {option.spec.help}"
        mend = f"for example {option.show(option.another_value())}."
        layer.problems.append(Problem("needs-value", what, why, mend, (option.flag,)))
        return
    layer.put(name, spelling, option.from_words(values))


def take_values(words: list[str], count: int) -> list[str]:
    """Take up to `count` words off the front, stopping at a flag and in a list also at a config file."""
    taken: list[str] = []
    while words and not is_flag(words[0]) and (count == MANY or len(taken) < count):
        if count != 1 and is_config(words[0]):
            break
        taken.append(words.pop(0))
    return taken


def is_flag(word: str) -> bool:
    """Whether a word begins a new option: two dashes, or one that does not begin a number."""
    return word.startswith("-") and word[1:2] not in (*"0123456789.", "")


def is_config(word: str) -> bool:
    """Whether a word that belongs to no single-valued option names a config file."""
    return word.endswith(".toml") and not word.startswith("-")


def _unknown(name: str) -> Problem:
    table = spellings()
    meant = nearest(name, table)
    stem = name.removeprefix("--no-").removeprefix("--disable-")
    if stem != name and (positive := table.get(f"--{stem}")) and positive.shorthand:
        option = positive.option
        mend = f"--{stem} stands for {option.show(positive.constant)}: state another {option.flag}."
        what, why = f"there is no flag {name}.", "one value has no opposite."
        return Problem("unknown-flag", what, why, mend, (name, option.flag))
    mend = f"did you mean {meant}?" if meant else SEE_HELP
    flags = (name, spellings()[meant].option.flag) if meant else (name,)
    return Problem("unknown-flag", f"there is no flag {name}.", "every flag must be obeyed.", mend, flags)


def _stray(word: str, after: str) -> Problem:
    known = spellings()
    as_flag = to_flag(word)
    why = "only a config file (CONFIG.toml) stands without a flag."
    mend = suggestion(as_flag, known, SEE_HELP)
    if after and known[after].constant is not UNSET and as_flag not in known:
        why, mend = f"{after} is a switch and takes no value.", f"write {after} alone."
    return Problem("stray-word", f"the word {word!r} belongs to no flag.", why, mend)
