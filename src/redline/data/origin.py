"""The tokenizer that a pair of token files was made with, kept beside it in `<prefix>.json`.

Megatron-LM's format has no place for it. The note is optional: a pair without one is as good as any other,
and a note that does not fit the pair (because only the pair was replaced) is ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from redline.data.indexed import IndexedDataset
from redline.data.layout import as_prefix
from redline.data.tokenizer import TokenizerSpec
from redline.errors import DataError
from redline.files import os_errors_as, write_json_atomic

FILES = ("tokenizer_model", "vocab_file", "merge_file")


def note_path(prefix: Path) -> Path:
    """`<prefix>.json`."""
    return prefix.with_name(prefix.name + ".json")


def write_note(prefix: Path, tokenizer: TokenizerSpec, *, num_tokens: int) -> None:
    """Record the tokenizer of a finished pair; paths are made absolute. Raises: DataError."""
    given = {name: getattr(tokenizer, name) for name in FILES}
    absolute = {name: str(Path(path).resolve()) for name, path in given.items() if path is not None}
    note = {"num_tokens": num_tokens, "tokenizer": asdict(tokenizer) | absolute}
    with os_errors_as(DataError, note_path(prefix), "write"):
        write_json_atomic(note_path(prefix), note)


def tokenizer_beside(prefix: str | Path) -> TokenizerSpec | None:
    """The tokenizer of a pair: by its note, else a tokenizer.json in the same folder, else None.

    A noted file that is gone is looked for beside the pair, where it is when both were moved together.

    Raises: DataError when the pair itself cannot be opened, or the noted tokenizer is nowhere.
    """
    prefix = as_prefix(prefix)
    num_tokens = IndexedDataset(prefix, mmap=False).num_tokens  # of the index: no token is read
    try:
        note = json.loads(note_path(prefix).read_text())
        if note["num_tokens"] == num_tokens:
            return _found(TokenizerSpec(**note["tokenizer"]), prefix)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    model = prefix.with_name("tokenizer.json")
    if not model.is_file():
        return None
    return TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))


def _found(spec: TokenizerSpec, prefix: Path) -> TokenizerSpec:
    """The noted tokenizer with the paths of today."""
    moved: dict[str, Any] = {}
    for name in FILES:
        path = getattr(spec, name)
        if path is None or Path(path).exists():
            continue
        moved[name] = str(prefix.with_name(Path(path).name))
        if not Path(moved[name]).exists():
            raise DataError(
                f"{note_path(prefix)} names the tokenizer file {path}, which is not there.",
                why="it was moved or removed since the data was prepared.",
                mend=f"put it back, or beside the data as {moved[name]}, or name it with --tokenizer-model.",
            )
    return replace(spec, **moved)
