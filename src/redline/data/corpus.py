"""Reading corpora: text files, JSON lines (also .gz) and Parquet, as chunks that workers turn into texts.

The reading process only cuts: a chunk is a few paths, a few raw lines or a few table rows. What costs time
(decoding, parsing, encoding) happens in `texts_of`, which runs in the worker. Chunks come in a fixed order,
so the result does not depend on the number of workers.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.errors import DataError
from redline.files import os_errors_as, refusal

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
FORMATS = ("auto", "text", "jsonl", "parquet")
CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 1024
UNREADABLE_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the corpus for one worker.

    Attributes:
        kind: "text" (pieces are paths), "jsonl" (raw lines) or "parquet" (dicts of column -> value).
        source: the file, for messages; a text piece names itself.
        first: number of the first line or row in the file, from 1.
        pieces: the documents, unparsed.
        num_bytes: bytes of input they stand for, for the progress bar.
    """

    kind: str
    source: str
    first: int
    pieces: Sequence[Any]
    num_bytes: int

    def where(self, offset: int) -> str:
        """A piece, as an error message names it: the file, and the line or row in it."""
        return self.pieces[offset] if self.kind == "text" else f"{self.source}:{self.first + offset}"


@dataclass(slots=True)
class Texts:
    """The parsed documents of a chunk.

    Attributes:
        by_key: for each key, one text a document.
        offsets: the piece that each document was.
        num_bad: malformed pieces.
    """

    by_key: dict[str, list[str]]
    offsets: list[int]
    num_bad: int = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Input files in a fixed order.

    Attributes:
        files: (path, "text" | "jsonl" | "parquet").
        keys: JSON keys or Parquet columns that hold text; the first one names a text file's content.
    """

    files: tuple[tuple[Path, str], ...]
    keys: tuple[str, ...] = ("text",)
    num_bytes: int = 0

    def chunks(self) -> Iterator[Chunk]:
        """The corpus cut into chunks. Raises: DataError for a file that cannot be read."""
        group: list[str] = []
        size = 0
        for path, kind in self.files:
            if kind == "text":
                group.append(str(path))
                size += path.stat().st_size
            if group and (kind != "text" or size >= CHUNK_BYTES):
                yield Chunk("text", "", 1, group, size)
                group, size = [], 0
            if kind == "jsonl":
                yield from _json_chunks(path)
            elif kind == "parquet":
                yield from _parquet_chunks(path, self.keys)
        if group:
            yield Chunk("text", "", 1, group, size)


def find_corpus(
    inputs: Sequence[str], *, keys: Sequence[str] = ("text",), input_format: str = "auto"
) -> Corpus:
    """Resolve files, folders (searched recursively) and glob patterns, sorted within each input.

    A folder gives its files with a known suffix; a file named outright, or matched by a pattern, is taken
    whatever its suffix, as text when that is unknown. `input_format` other than "auto" reads all of them in
    that format.

    Raises: DataError when an input does not exist or gives no file.
    """
    assert input_format in FORMATS
    found: dict[Path, str] = {}
    for given in inputs:
        with os_errors_as(DataError, Path(given), "read"):
            for path in _resolve(given):
                kind = (_kind(path) or "text") if input_format == "auto" else input_format
                found.setdefault(path, kind)
    return Corpus(tuple(found.items()), tuple(keys), sum(path.stat().st_size for path in found))


def _resolve(given: str) -> list[Path]:
    """The files that one input names, sorted. Raises: DataError when there is none; OSError."""
    path = Path(given)
    known = ", ".join((*TEXT_SUFFIXES, *JSON_SUFFIXES, *PARQUET_SUFFIXES))
    why = f"a folder is searched for {known} (also with .gz behind)."
    if path.is_dir():
        paths = [p for p in sorted(path.rglob("*")) if p.is_file() and _kind(p) is not None]
    elif path.exists():
        paths = [path]
    else:
        paths = [Path(p) for p in sorted(glob.glob(given, recursive=True)) if Path(p).is_file()]
        why = "no file, folder or match of a pattern has this name."
    if not paths:
        mend = "name files or a pattern such as 'corpus/**/*.c', in quotes."
        raise DataError(f"{given}: there is no input file.", why, mend)
    return paths


def texts_of(chunk: Chunk, keys: Sequence[str], *, skip_bad: bool = False) -> Texts:
    """Parse the documents of a chunk.

    Raises: DataError, naming file and line, for the first malformed document; with `skip_bad` they are
        counted.
    """
    texts = Texts({key: [] for key in keys}, [])
    for offset, piece in enumerate(chunk.pieces):
        try:
            document = _parse(chunk, piece, keys)
        except (ValueError, OSError, EOFError, zlib.error) as error:
            if skip_bad:
                texts.num_bad += 1
                continue
            raise _malformed(chunk, offset, keys, error) from error
        if document:
            texts.offsets.append(offset)
        for key, text in document.items():
            texts.by_key[key].append(text)
    return texts


def _malformed(chunk: Chunk, offset: int, keys: Sequence[str], error: Exception) -> DataError:
    if isinstance(error, UNREADABLE_GZIP):
        return _not_decompressed(chunk.where(offset), error, "leave it out with --skip-bad-lines")
    if isinstance(error, OSError) and error.strerror:
        return refusal(DataError, error, f"read {chunk.where(offset)}")
    if chunk.kind == "text":
        why = "a text file holds UTF-8."
        mend = "convert it (`iconv -t UTF-8`), or leave it out with --skip-bad-lines."
    else:
        why = f"a line or row is an object with text under {', '.join(map(repr, keys))}, in UTF-8."
        mend = "mend the file, name the right --json-keys, or add --skip-bad-lines."
    return DataError(f"{chunk.where(offset)}: {error}.", why, mend)


def _not_decompressed(path: str | Path, error: Exception, *others: str) -> DataError:
    return DataError(
        f"{path} is cut short, damaged or no gzip file.",
        why=f"it cannot be decompressed: {error}.",
        mend=f"{', or '.join(['copy or download the file again', *others])}.",
    )


def _parse(chunk: Chunk, piece: Any, keys: Sequence[str]) -> dict[str, str]:
    """One document as key -> text. Raises: ValueError, OSError, EOFError, zlib.error."""
    if chunk.kind == "text":
        with _open(Path(piece)) as handle:
            return {keys[0]: handle.read().decode()}
    if chunk.kind == "jsonl":
        line = piece.strip()
        if not line:
            return {}
        piece = json.loads(line)
        if not isinstance(piece, dict):
            raise ValueError(f"a JSON object is expected, not {type(piece).__name__}")
    for key in keys:
        if not isinstance(piece.get(key), str):
            found = f"it is {type(piece[key]).__name__}" if key in piece else f"the keys are {list(piece)}"
            raise ValueError(f"no text under {key!r} ({found})")
        piece[key].encode()  # lone surrogates are no text
    return {key: piece[key] for key in keys}


def _kind(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    for kind, suffixes in (("text", TEXT_SUFFIXES), ("jsonl", JSON_SUFFIXES), ("parquet", PARQUET_SUFFIXES)):
        if suffix.lower() in suffixes:
            return kind
    return None


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _json_chunks(path: Path) -> Iterator[Chunk]:
    with os_errors_as(DataError, path, "read"), open(path, "rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        first, consumed = 1, 0
        try:
            while pieces := lines.readlines(CHUNK_BYTES):
                consumed, before = raw.tell(), consumed
                yield Chunk("jsonl", str(path), first, pieces, consumed - before)
                first += len(pieces)
        except UNREADABLE_GZIP as error:
            raise _not_decompressed(path, error) from error


def _parquet_chunks(path: Path, keys: Sequence[str]) -> Iterator[Chunk]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs the pyarrow package.",
            why="it is not installed.",
            mend="pip install pyarrow.",
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            missing = [key for key in keys if key not in table.schema_arrow.names]
            if missing:
                raise DataError(
                    f"{path} has no column {', '.join(missing)}.",
                    why=f"its columns are {', '.join(table.schema_arrow.names)}.",
                    mend="name the columns that hold text with --json-keys.",
                )
            size, rows, first = path.stat().st_size, max(table.metadata.num_rows, 1), 1
            for batch in table.iter_batches(CHUNK_ROWS, columns=list(keys)):
                yield Chunk("parquet", str(path), first, batch.to_pylist(), size * batch.num_rows // rows)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {str(error).rstrip('.')}.",
            why="it is cut short, or no Parquet file.",
            mend="copy or write the file again.",
        ) from error
