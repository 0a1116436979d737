"""The tokenizer that a pair of token files was made with, kept beside it in `<prefix>.json`.

Megatron-LM's format has no place for it. The note is optional: a pair without one is as good as any other,
and a note that does not fit the pair (because only the pair was replaced), or is none at all, is ignored;
`note_fault` says why.
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
    noted = _noted(prefix)
    if isinstance(noted, TokenizerSpec):
        return _found(noted, prefix)
    model = prefix.with_name("tokenizer.json")
    if not model.is_file():
        return None
    return TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))


def note_fault(prefix: str | Path) -> str | None:
    """Why what lies in the place of a pair's note is ignored; None where it is not, or nothing lies there.

    Raises: DataError when the pair itself cannot be opened.
    """
    noted = _noted(as_prefix(prefix))
    return noted if isinstance(noted, str) else None


def _noted(prefix: Path) -> TokenizerSpec | str | None:
    """What the note of a pair names, or why it names nothing; None without a note."""
    path = note_path(prefix)
    num_tokens = IndexedDataset(prefix, mmap=False).num_tokens  # of the index: no token is read
    try:
        note = json.loads(path.read_text())
        of, spec = note["num_tokens"], TokenizerSpec(**note["tokenizer"])
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    except ValueError as error:
        return f"{path} is not whole JSON ({error})"
    except (KeyError, TypeError):
        return f"{path} does not name the tokenizer of the data"
    return spec if of == num_tokens else f"{path} is of data of {of} tokens, and this has {num_tokens}"


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
