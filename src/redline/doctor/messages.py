"""Texts of checks and of the report, one table a language, in doctor/texts/."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

LANGUAGES = ("en", "zh")
PARTS = ("title", "looks", "evidence", "why", "mend")


@cache
def table(lang: str) -> Mapping[str, Mapping[str, Any]]:
    """Every text of a language by check id."""
    text = (files("redline.doctor") / "texts" / f"{lang}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def phrases(lang: str) -> Mapping[str, str]:
    """Fixed words of the report in a language."""
    text = (files("redline.doctor") / "texts" / f"report-{lang}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def texts_of(id: str, variant: str, lang: str) -> dict[str, str]:
    """title, looks, evidence, why and mend of a check; a variant replaces some of them."""
    whole = table(lang)[id]
    texts = {part: str(whole[part]) for part in PARTS}
    if variant and isinstance(other := whole.get(variant), Mapping):
        texts |= {part: str(text) for part, text in other.items()}
    return texts
