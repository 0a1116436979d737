"""A launch with its mends made: single words changed or added in the lines that hold them.

A flag's value is replaced where the flag stands; a flag is taken out there; a new flag is put in front of one
that stands there already, so that arrays, strings and continued lines all stay what they are. Variables are
exported before the first command. What cannot be placed so is reported, never guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from redline.config.tree import options_by_field
from redline.doctor.case import Case, unstated
from redline.doctor.diagnose import field_uses, fields_of
from redline.doctor.finding import Mend
from redline.doctor.renames import meaning

VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|\$\{[^}]*\}|\$\([^)]*\)|[^\s"'`)\\;|&]+)"""
SAFE_VALUE = re.compile(r"[\w.,:=/+*@%-]+")


@dataclass(slots=True)
class Patch:
    """The new text, and what could not be done."""

    before: str
    lines: list[str]
    undone: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The text with all edits."""
        return "".join(self.lines)

    def diff(self, old: str, new: str) -> str:
        """A unified diff from `old` to `new`, the names it prints."""
        return "".join(
            difflib.unified_diff(
                self.before.splitlines(keepends=True),
                self.text.splitlines(keepends=True),
                fromfile=old,
                tofile=new,
            )
        )


def patch_launch(case: Case, mend: Mend) -> Patch:
    """The launch's text with the mend's changes."""
    assert case.launch is not None
    text = case.launch.text
    patch = Patch(text, text.splitlines(keepends=True))
    if text and not text.endswith("\n"):
        patch.lines[-1] += "\n"
    if case.launch.kind != "bash":
        _set_keys(case, patch, mend)
        return patch
    renamed = {flag: words for flag, words in mend.rename.items() if _still(mend, words)}
    written = fields_of(renamed.values())
    for flag, words in mend.rename.items():
        if flag in renamed:
            _rename(case, patch, flag, words)
        else:
            _drop(case, patch, flag)
    for name, value in mend.values.items():
        if (
            case.get(name) != value
            and name not in written
            and not mend.rename.keys() & field_uses(case, name)
        ):
            _set_flag(case, patch, name, value)
    for flag in mend.drop:
        _drop(case, patch, flag)
    if patch.added:
        _add(case, patch)
    for variable, value in mend.environment.items():
        _export(case, patch, variable, value)
    return patch


def _set_keys(case: Case, patch: Patch, mend: Mend) -> None:
    """The options of a TOML or YAML file; variables, and keys that are no option, are left to the hand."""
    assert case.launch is not None
    for name, value in mend.values.items():
        if case.get(name) == value:
            continue
        if case.launch.kind == "yaml":
            _set_yaml(patch, name, value)
        else:
            _set_toml(patch, name, value, unstated(name, "redline"))
    patch.undone += [f"{flag} -> {words}" for flag, words in mend.rename.items()]
    patch.undone += [f"without {flag}" for flag in mend.drop]
    for name, value in mend.environment.items():
        patch.undone.append(f"unset {name}" if value is None else f"export {name}={value}")


def _set_flag(case: Case, patch: Patch, name: str, value: Any) -> None:
    option = options_by_field()[name]
    typed = field_uses(case, name)
    gone = value is None or value == unstated(name, case.dialect)
    if elsewhere := _elsewhere(case, name):
        shown = typed[0] if typed else option.flag
        patch.undone.append(f"{elsewhere} " + (f"without {shown}" if gone else option.show(value)))
        return
    switch = option.kind is bool and option.count == 0
    in_place = option.flag if typed[:1] == [option.flag] and not gone and not switch else None
    if in_place and _replace_value(case, patch, in_place, option.show(value)):
        typed, gone = typed[1:], True
    for flag in typed:
        _drop(case, patch, flag)
    if not gone:
        patch.added.append(option.show(value))


def _elsewhere(case: Case, name: str) -> str:
    """FILE:LINE of an option that counts where no edit reaches it, else "": in a sourced file, or cut off."""
    assert case.launch is not None
    uses = (*case.launch.cut_off, *reversed(case.launch.flags))
    use = next((use for use in uses if use.field == name), None)
    if use is None or (use not in case.launch.cut_off and str(use.file) == str(case.launch.path)):
        return ""
    return f"{use.file}:{use.line}"


def _still(mend: Mend, words: str) -> bool:
    """Whether words in place of a flag say what the whole mend wants: a later change may overrule them."""
    said = meaning(words.split()) or {}
    return all(mend.values.get(name, value) == value for name, value in said.items())


def _rename(case: Case, patch: Patch, flag: str, words: str) -> None:
    """Other words in place of a flag and its value."""
    use, spot = case.uses(flag), _spot(case, patch, flag)
    if use is None or spot is None:
        patch.undone.append(f"{flag} -> {words}")
        return
    place, found = spot
    line, end = patch.lines[place], found.end()
    for _ in (use.value or "").split():
        value = re.match(rf"(?:[ \t]+|=)(?!-){VALUE}", line[end:])
        if value is None:
            patch.undone.append(f"{flag} -> {words}")
            return
        end += value.end()
    patch.lines[place] = line[: found.start()] + words + line[end:]


def _lines_of(case: Case, flag: str) -> list[int]:
    """Indices of the lines of the main file on which a flag stands, the last use first."""
    assert case.launch is not None
    path = str(case.launch.path)
    uses = [use for use in case.launch.flags if use.flag == flag and str(use.file) == path and use.line]
    return [use.line - 1 for use in reversed(uses)]


def _spot(case: Case, patch: Patch, flag: str) -> tuple[int, re.Match[str]] | None:
    """(line, match) of a flag as a word of its own outside a comment."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(flag)}(?![\w-])")
    for place in _lines_of(case, flag):
        if place < len(patch.lines) and (found := pattern.search(patch.lines[place])):
            comment = re.search(r"(?:^|\s)#", patch.lines[place])
            if comment is None or comment.start() > found.start():
                return place, found
    return None


def _replace_value(case: Case, patch: Patch, flag: str, shown: str) -> bool:
    spot = _spot(case, patch, flag)
    if spot is None:
        return False
    place, found = spot
    line, rest = patch.lines[place], patch.lines[place][found.end() :]
    value = re.match(rf"(?:[ \t]+|=){VALUE}", rest)
    if value is None:
        return False
    patch.lines[place] = line[: found.start()] + shown + rest[value.end() :]
    return True


def _drop(case: Case, patch: Patch, flag: str) -> None:
    """Take out a flag and its values."""
    if flag in patch.dropped:  # by another mend
        return
    patch.dropped.add(flag)
    spot = _spot(case, patch, flag)
    use = case.uses(flag)
    if use is None:  # an older flag states this one too, and goes by itself
        return
    if spot is None:
        patch.undone.append(f"without {flag}")
        return
    place, found = spot
    line, end = patch.lines[place], found.end()
    while use.value is not None and (value := re.match(rf"(?:[ \t]+|=)(?!-){VALUE}", line[end:])):
        end += value.end()
        if use.field is None or options_by_field()[use.field].count == 1:
            break
    if end == found.end() and use.value not in (None, "", "true"):
        patch.undone.append(f"without {flag}")
        return
    before, after = line[: found.start()], line[end:]
    if before.endswith((" ", "\t")) and after[:1] in (" ", "\t"):
        after = after.lstrip(" \t") if not before.strip() else after[1:]
    patch.lines[place] = before + after
    if not after.strip():
        patch.lines[place] = before.rstrip(" \t") + after.lstrip(" \t")
    if not patch.lines[place].strip(" \t\n\\"):
        # A line with nothing left goes, unless its end also ends a command that the line before continues.
        if line.rstrip().endswith("\\") or not _continues(patch.lines, place - 1):
            patch.lines[place] = ""
        else:
            patch.lines[place - 1] = re.sub(r"[ \t]*\\\n$", "\n", patch.lines[place - 1])
            patch.lines[place] = ""


def _continues(lines: list[str], place: int) -> bool:
    return place >= 0 and lines[place].rstrip("\n").endswith("\\")


def _add(case: Case, patch: Patch) -> None:
    """Put flags before one that stands in the main file: a line each where flags have lines of their own."""
    spots = [
        spot for spot in _spots(case, patch) if not _in_element_of_its_own(patch.lines[spot[0]], spot[1])
    ]
    leading = (spot for spot in spots if not patch.lines[spot[0]][: spot[1].start()].strip())
    best = next(leading, next(iter(spots), None))
    if best is None:
        patch.undone += patch.added
        return
    place, flag = best
    line = patch.lines[place]
    indent = line[: flag.start()]
    if indent.strip():
        patch.lines[place] = f"{indent}{' '.join(patch.added)} {line[flag.start() :]}"
        return
    # A line that begins with a flag continues a command, or stands in an array or a string of several lines.
    continued = _continues(patch.lines, place - 1) or _continues(patch.lines, place)
    end = re.search(r"[ \t]*\\$", line.rstrip("\n")) if continued else None
    ending = (end[0] if end else " \\") if continued else ""
    patch.lines[place] = "".join(f"{indent}{shown}{ending}\n" for shown in patch.added) + line


def _spots(case: Case, patch: Patch) -> Iterator[tuple[int, re.Match[str]]]:
    """Where the known flags of the launch stand."""
    assert case.launch is not None
    for use in case.launch.flags:
        if use.state != "unknown" and (spot := _spot(case, patch, use.flag)) is not None:
            yield spot


def _in_element_of_its_own(line: str, found: re.Match[str]) -> bool:
    """Whether the flag is quoted by itself ("--flag" in an array), where a neighbour would join its word."""
    around = line[max(0, found.start() - 1) : found.start()], line[found.end() : found.end() + 1]
    return around[0] in ("'", '"') and around[1] in (around[0], "=")


def _export(case: Case, patch: Patch, name: str, value: str | None) -> None:
    assert case.launch is not None
    file, number = case.place(name)
    if name in case.launch.environment and file != str(case.launch.path):  # it would overrule this one
        change = f"unset {name}" if value is None else f"export {name}={value}"
        patch.undone.append(f"{file}:{number} {change}")
        return
    pattern = re.compile(rf"(?<![\w]){re.escape(name)}={VALUE}?")
    places = [place for place, line in enumerate(patch.lines) if pattern.search(line.split("#")[0])]
    if places:
        for place in places:
            line = patch.lines[place]
            if value is not None:
                patch.lines[place] = pattern.sub(f"{name}={value}", line, count=1)
            elif re.fullmatch(
                rf"\s*(?:export\s+)?{re.escape(name)}={VALUE}?\s*;?\s*(?:#.*)?", line.rstrip("\n")
            ):
                patch.lines[place] = ""
            elif among := re.match(
                rf"(\s*(?:export\s+)?(?:\w+={VALUE}?\s+)*){re.escape(name)}={VALUE}?(?:\s+|$)", line
            ):
                patch.lines[place] = (
                    among[1] + line[among.end() :] if line[among.end() :] else among[1].rstrip() + "\n"
                )
            else:
                patch.undone.append(f"unset {name}")
        return
    if value is None:
        patch.undone.append(f"unset {name}")
        return
    assert SAFE_VALUE.fullmatch(value), value
    patch.lines.insert(_first_command(patch.lines), f"export {name}={value}\n")


def _first_command(lines: list[str]) -> int:
    """The line before which an export stands well: after the shebang, comments and scheduler's directives."""
    for place, line in enumerate(lines):
        words = line.strip()
        if words and not words.startswith("#") and not words.startswith("set "):
            return place
    return len(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _set_toml(patch: Patch, name: str, value: Any, default: Any) -> None:
    """Change, add or take out a key in its section's table."""
    option = options_by_field()[name]
    words = {
        name,
        f"no_{name}",
        f"disable_{name}",
        *(flag[2:].replace("-", "_") for flag in option.spec.shorthands),
    }
    key = re.compile(rf"^\s*(?:{'|'.join(map(re.escape, sorted(words)))})\s*=")
    kept = [line for line in patch.lines if not key.match(line)]
    first = next((place for place, line in enumerate(patch.lines) if key.match(line)), None)
    new = None if value is None or value == default else f"{name} = {_toml(value)}\n"
    patch.lines = kept
    if new is None:
        return
    if first is not None:
        patch.lines.insert(first, new)
        return
    header = re.compile(rf"^\s*\[{re.escape(option.section)}\]")
    place = next((place for place, line in enumerate(patch.lines) if header.match(line)), None)
    if place is None:
        patch.lines += ["\n" if patch.lines else "", f"[{option.section}]\n", new]
    else:
        patch.lines.insert(place + 1, new)


def _set_yaml(patch: Patch, name: str, value: Any) -> None:
    """Change a key of a YAML file, wherever it is nested; a new one goes beside its kin, else to the top."""
    shown = "null" if value is None else _toml(value)
    key = _yaml_key(name)
    for place, line in enumerate(patch.lines):
        if found := key.match(line):
            comment = line[found.end() :]
            patch.lines[place] = f"{found[1]}{found[2]}{shown}{' ' if comment.strip() else ''}{comment}"
            return
    table = options_by_field()
    kin = [other for other, option in table.items() if option.section == table[name].section]
    places = {place: found for other in kin for place, found in _yaml_places(patch, _yaml_key(other))}
    if places:
        place = max(places)
        indent = re.match(r"\s*", places[place][1])[0]  # type: ignore[index]
        patch.lines.insert(place + 1, f"{indent}{name}: {shown}\n")
    elif any(re.match(r"\w+\s*:", line) for line in patch.lines):
        patch.lines.append(f"{name}: {shown}\n")
    else:
        patch.undone.append(table[name].show(value))


def _yaml_key(name: str) -> re.Pattern[str]:
    """(key, colon, value) of an option on a line of its own."""
    return re.compile(
        rf"^(\s*(?:-{{0,2}}){re.escape(name)}|\s*--{re.escape(name.replace('_', '-'))})(\s*:\s*)[^#\n]*"
    )


def _yaml_places(patch: Patch, key: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """Lines that hold a key and its value; one whose value goes on below is left alone."""
    for place, line in enumerate(patch.lines):
        found = key.match(line)
        if found and found[0].rpartition(":")[2].strip() not in ("", "|", ">") and "-" not in found[1]:
            yield place, found
