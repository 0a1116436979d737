"""The keys of a YAML file with their values and lines, read from the stream of events.

No object is ever constructed: a parser's events are walked with a stack of our own, of bounded depth and
length, so neither tags, nor aliases of aliases, nor deep nesting can do harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.config.launch.bash import read_bytes
from redline.errors import DataError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24
MAX_LEAVES = 5_000
MEND = "correct that line, or name another file."


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key with a scalar, or with a list of scalars as a tuple."""

    key: str
    value: Any
    line: int


class _Frame:
    """A mapping or sequence that is open."""

    def __init__(self, key: str, line: int, *, is_mapping: bool) -> None:
        self.key, self.line, self.is_mapping = key, line, is_mapping
        self.waiting = ""  # the key whose value comes next
        self.waiting_line = line
        self.items: list[Any] = []


def leaves(path: Path) -> list[Leaf]:
    """Every key of the first document that has a scalar value, at any depth; the deepest key names it.

    Raises: DataError when the file cannot be read, is no YAML, or needs a package that is not installed.
    """
    data = read_bytes(path)
    if len(data) > MAX_BYTES:
        raise DataError(f"{path} has {len(data):,} bytes.", f"configs are read up to {MAX_BYTES:,}.", MEND)
    try:
        import yaml
    except ImportError as exc:
        raise DataError(
            "YAML files need the package pyyaml.", "it is not installed.", "pip install 'redline[doctor]'."
        ) from exc
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _walk(yaml, yaml.parse(data.decode("utf-8"), Loader=loader), path)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        reason = getattr(exc, "problem", None) or "its text is not readable"
        raise DataError(f"{path} is not a YAML file{where}.", f"{reason}.", MEND) from exc


def _walk(yaml: Any, events: Any, path: Path) -> list[Leaf]:
    found: list[Leaf] = []
    stack: list[_Frame] = []
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentEndEvent) or len(found) >= MAX_LEAVES:
            break
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(stack) >= MAX_DEPTH:
                raise DataError(f"{path} is nested too deeply.", f"at line {line}.", MEND)
            key, key_line = _taken(stack, line)
            stack.append(_Frame(key, key_line, is_mapping=isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            frame = stack.pop()
            if not frame.is_mapping and frame.key and frame.items:
                found.append(Leaf(frame.key, tuple(frame.items), frame.line))
        elif isinstance(event, yaml.ScalarEvent):
            _scalar(event, line, stack, found)
        elif isinstance(event, yaml.AliasEvent):
            _taken(stack, line)
    return found


def _taken(stack: list[_Frame], line: int) -> tuple[str, int]:
    """The key that a value belongs to, which then waits no longer."""
    if not stack or not stack[-1].is_mapping:
        return "", line
    frame = stack[-1]
    key, frame.waiting = frame.waiting, ""
    return key, frame.waiting_line


def _scalar(event: Any, line: int, stack: list[_Frame], found: list[Leaf]) -> None:
    if not stack:
        return
    frame = stack[-1]
    value = _value(event.value) if event.style in (None, "") and event.tag is None else event.value
    if not frame.is_mapping:
        frame.items.append(value)
    elif not frame.waiting:
        frame.waiting, frame.waiting_line = str(event.value) or "?", line
    else:
        key, key_line = _taken(stack, line)
        found.append(Leaf(key, value, key_line))


def _value(text: str) -> Any:
    """A plain scalar: true, null, a number, else the text."""
    lowered = text.lower()
    if lowered in ("true", "yes", "on"):
        return True
    if lowered in ("false", "no", "off"):
        return False
    if lowered in ("null", "~", "", "none"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
