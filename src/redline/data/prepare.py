"""From a corpus to token files: `redline data prepare`.

Chunks go to worker processes, encoded chunks come back in order and are appended; a few chunks a worker are
under way at a time, so memory stays small whatever the corpus's size. Output appears when everything has been
written.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redline.data.corpus import Chunk, Corpus, texts_of
from redline.data.layout import bin_path, idx_path, token_dtype
from redline.data.origin import write_note
from redline.data.tokenizer import Tokenizer, TokenizerSpec, open_tokenizer, require_eod
from redline.data.writer import IndexedWriter, refuse_existing
from redline.errors import DataError

CHUNKS_AHEAD = 4  # a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSpec:
    """What to do with each document.

    Attributes:
        tokenizer: how to encode it.
        append_eod: end each document with the end-of-document token.
        skip_bad: count malformed documents instead of stopping at the first.
        num_workers: processes; 1 encodes in this one.
        overwrite: replace existing output.
    """

    tokenizer: TokenizerSpec
    append_eod: bool = True
    skip_bad: bool = False
    num_workers: int = 1
    overwrite: bool = False


@dataclass(slots=True)
class PrepareReport:
    """What was written.

    Attributes:
        prefixes: the output of each key, for `--data-path`.
        num_documents, num_tokens: written, for each key.
        num_empty: documents without a token, left out, all keys together.
        num_bad: malformed documents left out (`skip_bad`).
        dtype: storage of the tokens.
    """

    prefixes: dict[str, Path]
    dtype: str
    num_documents: dict[str, int] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_empty: int = 0
    num_bad: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded chunk: for each key (tokens, length of each document), both joined over its documents."""

    by_key: dict[str, tuple[NDArray[Any], NDArray[np.int32]]]
    num_empty: int
    num_bad: int
    num_bytes: int


def prepare(
    corpus: Corpus,
    output_prefix: Path,
    spec: PrepareSpec,
    *,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> PrepareReport:
    """Encode `corpus` into `<output_prefix>_<key>_document.bin/.idx/.json` for each key.

    Args:
        progress: called with the bytes of input done since the last call.
    Raises: ConfigError before any file is written when the tokenizer cannot do what is asked; DataError for
        malformed or empty input, existing output, or a failing disk. Nothing half-written stays.
    """
    tokenizer = open_tokenizer(spec.tokenizer)
    if spec.append_eod:
        require_eod(tokenizer, "--append-eod")
    prefixes = {key: output_prefix.with_name(f"{output_prefix.name}_{key}_document") for key in corpus.keys}
    if not spec.overwrite:
        for prefix in prefixes.values():
            refuse_existing(bin_path(prefix), idx_path(prefix))
    dtype = token_dtype(tokenizer.vocab_size)
    report = PrepareReport(prefixes, dtype.name, dict.fromkeys(prefixes, 0), dict.fromkeys(prefixes, 0))
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedWriter(prefix, dtype, overwrite=spec.overwrite))
            for key, prefix in prefixes.items()
        }
        for encoded in _encode_all(corpus, spec, tokenizer):
            for key, (tokens, lengths) in encoded.by_key.items():
                writers[key].add_documents(tokens, lengths)
                report.num_documents[key] += len(lengths)
                report.num_tokens[key] += len(tokens)
            report.num_empty += encoded.num_empty
            report.num_bad += encoded.num_bad
            progress(encoded.num_bytes)
        for key, count in report.num_documents.items():
            if not count:
                raise _no_documents(corpus, key, report)
    for key, prefix in prefixes.items():
        write_note(prefix, spec.tokenizer, num_tokens=report.num_tokens[key])
    return report


def _no_documents(corpus: Corpus, key: str, report: PrepareReport) -> DataError:
    return DataError(
        f"{len(corpus.files)} input files hold no text under {key!r}.",
        why=f"{report.num_empty} documents are empty and {report.num_bad} are malformed.",
        mend="name input with text in it, or the right --json-keys.",
    )


def encode_chunk(chunk: Chunk, keys: tuple[str, ...], spec: PrepareSpec, tokenizer: Tokenizer) -> Encoded:
    """Parse and encode one chunk. Raises: DataError for malformed documents."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = [tokenizer.eod_id] if spec.append_eod else []
    texts = texts_of(chunk, keys, skip_bad=spec.skip_bad)
    by_key, num_empty = {}, 0
    for key, documents in texts.by_key.items():
        encoded = [ids for ids in map(tokenizer.encode, documents) if ids]
        num_empty += len(documents) - len(encoded)
        lengths = np.array([len(ids) + len(end) for ids in encoded], np.int32)
        joined = itertools.chain.from_iterable(itertools.chain(ids, end) for ids in encoded)
        by_key[key] = (np.fromiter(joined, dtype, int(lengths.sum(dtype=np.int64))), lengths)
    return Encoded(by_key, num_empty, texts.num_bad, chunk.num_bytes)


def _encode_all(corpus: Corpus, spec: PrepareSpec, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encoded chunks in the corpus's order, made by `spec.num_workers` processes."""
    chunks = corpus.chunks()
    if spec.num_workers <= 1:
        for chunk in chunks:
            yield encode_chunk(chunk, corpus.keys, spec, tokenizer)
        return
    pool = ProcessPoolExecutor(
        spec.num_workers,
        # A fresh interpreter: forking a process whose tokenizer library has started threads may hang.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,  # an interrupt is the parent's business
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        yield from _in_order(
            (pool.submit(_work, chunk, corpus.keys, spec) for chunk in chunks),
            spec.num_workers * CHUNKS_AHEAD,
        )
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended unexpectedly.",
            why="the system stops processes when memory runs out.",
            mend="use fewer --workers.",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(submitted: Iterable[Future[Encoded]], ahead: int) -> Iterator[Encoded]:
    """Results in the order of submission; the iterable is drawn `ahead` tasks before the one awaited."""
    under_way: deque[Future[Encoded]] = deque()
    for task in submitted:
        under_way.append(task)
        if len(under_way) >= ahead:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _work(chunk: Chunk, keys: tuple[str, ...], spec: PrepareSpec) -> Encoded:
    return encode_chunk(chunk, keys, spec, _opened_once(spec.tokenizer))


@functools.lru_cache(maxsize=1)
def _opened_once(spec: TokenizerSpec) -> Tokenizer:
    return open_tokenizer(spec)
