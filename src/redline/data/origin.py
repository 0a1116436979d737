"""The tokenizer that a pair of token files was made with, kept beside it in `<prefix>.json`.

Megatron-LM's format has no place for it. The note is optional: a pair without one is as good as any other,
and a note that does not fit the pair (because only the pair was replaced) is ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from redline.data.indexed import IndexedDataset
from redline.data.layout import as_prefix
from redline.data.tokenizer import TokenizerSpec
from redline.errors import DataError
from redline.files import os_errors_as, write_json_atomic


def note_path(prefix: Path) -> Path:
    """`<prefix>.json`."""
    return prefix.with_name(prefix.name + ".json")


def write_note(prefix: Path, tokenizer: TokenizerSpec, *, num_tokens: int) -> None:
    """Record the tokenizer of a finished pair; paths are made absolute. Raises: DataError."""
    files = ("tokenizer_model", "vocab_file", "merge_file")
    given = {name: getattr(tokenizer, name) for name in files}
    absolute = {name: str(Path(path).resolve()) for name, path in given.items() if path is not None}
    note = {"num_tokens": num_tokens, "tokenizer": asdict(tokenizer) | absolute}
    with os_errors_as(DataError, note_path(prefix), "write"):
        write_json_atomic(note_path(prefix), note)


def tokenizer_beside(prefix: str | Path) -> TokenizerSpec | None:
    """The tokenizer of a pair: by its note, else a tokenizer.json in the same folder, else None.

    Raises: DataError when the pair itself cannot be opened.
    """
    prefix = as_prefix(prefix)
    num_tokens = IndexedDataset(prefix, mmap=False).num_tokens  # of the index: no token is read
    try:
        note = json.loads(note_path(prefix).read_text())
        if note["num_tokens"] == num_tokens:
            return TokenizerSpec(**note["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    model = prefix.with_name("tokenizer.json")
    if not model.is_file():
        return None
    return TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))
