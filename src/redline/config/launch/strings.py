"""Pure functions of shell parameter expansion: slices, trimming, replacing, and what backslashes mean."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from redline.config.launch.values import MAX_CHARS

OPERATOR = re.compile(r":?[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")


def begin(start: int, length: int) -> int:
    return start if start >= 0 else max(length + start, 0)


def trim(value: str, operator: str, pattern: str) -> str:
    """${X%pattern} (shortest suffix), %% (longest), # and ## (prefixes)."""
    if len(value) > MAX_CHARS // 50:
        return value
    ends = range(len(value) + 1)
    if operator[0] == "%":
        cuts = reversed(ends) if operator == "%" else ends
        return next((value[:cut] for cut in cuts if fnmatchcase(value[cut:], pattern)), value)
    cuts = ends if operator == "#" else reversed(ends)
    return next((value[cut:] for cut in cuts if fnmatchcase(value[:cut], pattern)), value)


def replace(value: str, pattern: str, *, everywhere: bool) -> str:
    """${X/old/new}: literal patterns, which is what scripts use; others leave the text as it is."""
    old, _, new = pattern.partition("/")
    if old.startswith("\\"):  # ${X/\//_}
        escaped = re.match(r"\\(.)(.*)", pattern, re.DOTALL)
        if escaped:
            _, _, new = escaped[2].partition("/")
            old = escaped[1] + escaped[2].partition("/")[0]
    if not old or any(character in old for character in "*?["):
        return value
    return value.replace(old, new, -1 if everywhere else 1)[:MAX_CHARS]


def unescape(text: str) -> str:
    return re.sub(r"\\(\n|.)", lambda match: "" if match[1] == "\n" else match[1], text)


def unescape_quoted(text: str) -> str:
    return re.sub(r'\\([\n$`"\\])', lambda match: "" if match[1] == "\n" else match[1], text)


def ansi(text: str) -> str:
    escapes = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[0]), text, flags=re.DOTALL)
