"""From a corpus to token files: `redline data prepare`.

Chunks go to worker processes, encoded chunks come back in order and are appended; a few chunks a worker are
under way at a time, so memory stays small whatever the corpus's size. Output appears when everything has been
written.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
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
from redline.files import os_errors_as

CHUNKS_AHEAD = 4  # a worker
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSpec:
    """What to do with each document.

    Attributes:
        tokenizer: how to encode it.
        append_eod: end each document with the end-of-document token.
        skip_bad: count malformed documents instead of stopping at the first.
        num_workers: processes; 1 encodes in this one.
        overwrite: replace existing output.
        tokenizer_target: where the tokenizer's file is moved once the data is complete: one trained for this
            data neither appears without it nor takes the place of the one that older data was made with.
    """

    tokenizer: TokenizerSpec
    append_eod: bool = True
    skip_bad: bool = False
    num_workers: int = 1
    overwrite: bool = False
    tokenizer_target: Path | None = None


@dataclass(slots=True)
class PrepareReport:
    """What was written.

    Attributes:
        tokenizer: how to open it again.
        prefixes: the output of each key, for `--data-path`.
        num_documents, num_tokens: written, for each key.
        num_empty: documents without a token, left out, all keys together.
        num_bad: malformed documents left out (`skip_bad`).
        dtype: storage of the tokens.
    """

    tokenizer: TokenizerSpec
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
    prefixes = output_prefixes(output_prefix, corpus.keys, overwrite=spec.overwrite)
    dtype = token_dtype(tokenizer.vocab_size)
    none = dict.fromkeys(prefixes, 0)
    report = PrepareReport(spec.tokenizer, prefixes, dtype.name, dict(none), dict(none))
    with ExitStack() as stack:
        with _undisturbed():
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
    if spec.tokenizer_target is not None:
        report.tokenizer = _move_tokenizer(spec.tokenizer, spec.tokenizer_target)
    for key, prefix in prefixes.items():
        write_note(prefix, report.tokenizer, num_tokens=report.num_tokens[key])
    return report


def output_prefixes(output_prefix: Path, keys: Sequence[str], *, overwrite: bool) -> dict[str, Path]:
    """The prefix of each key's pair. Raises: DataError when one of its files exists and must stay."""
    prefixes = {key: output_prefix.with_name(f"{output_prefix.name}_{key}_document") for key in keys}
    if not overwrite:
        for prefix in prefixes.values():
            refuse_existing(bin_path(prefix), idx_path(prefix))
    return prefixes


def _move_tokenizer(spec: TokenizerSpec, target: Path) -> TokenizerSpec:
    assert spec.tokenizer_model is not None, spec
    with os_errors_as(DataError, target, "write"):
        os.replace(spec.tokenizer_model, target)
    return replace(spec, tokenizer_model=str(target))


def _no_documents(corpus: Corpus, key: str, report: PrepareReport) -> DataError:
    return DataError(
        f"no input file holds text under {key!r} ({len(corpus.files)} read).",
        why=f"documents found empty: {report.num_empty}, malformed: {report.num_bad}.",
        mend="name input with text in it, or the right --json-keys.",
    )


def encode_chunk(chunk: Chunk, keys: tuple[str, ...], spec: PrepareSpec, tokenizer: Tokenizer) -> Encoded:
    """Parse and encode one chunk. Raises: DataError for malformed documents."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = [tokenizer.eod_id] if spec.append_eod else []
    texts = texts_of(chunk, keys, skip_bad=spec.skip_bad)
    by_key, num_empty, num_bad = {}, 0, texts.num_bad
    for key, documents in texts.by_key.items():
        # Not strict: a text file has no document of the further keys.
        places = zip(texts.offsets, documents, strict=False)
        found = [_encode(chunk, offset, text, spec, tokenizer) for offset, text in places]
        num_bad += found.count(None)
        num_empty += found.count([])
        encoded = [ids for ids in found if ids]
        lengths = np.array([len(ids) + len(end) for ids in encoded], np.int32)
        joined = itertools.chain.from_iterable(itertools.chain(ids, end) for ids in encoded)
        by_key[key] = (np.fromiter(joined, dtype, int(lengths.sum(dtype=np.int64))), lengths)
    return Encoded(by_key, num_empty, num_bad, chunk.num_bytes)


def _encode(
    chunk: Chunk, offset: int, text: str, spec: PrepareSpec, tokenizer: Tokenizer
) -> list[int] | None:
    """The ids of one document; None for one that the tokenizer cannot read and that may be left out."""
    try:
        return tokenizer.encode(text)
    except DataError as error:
        if spec.skip_bad:
            return None
        raise DataError(f"{chunk.where(offset)}: {error.what}", error.why, error.mend) from error


def _encode_all(corpus: Corpus, spec: PrepareSpec, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encoded chunks in the corpus's order, made by `spec.num_workers` processes."""
    chunks = corpus.chunks()
    if spec.num_workers <= 1:
        for chunk in chunks:
            yield encode_chunk(chunk, corpus.keys, spec, tokenizer)
        return

    def submit(chunk: Chunk) -> Future[Encoded]:
        with _undisturbed():  # this may start a worker
            return pool.submit(_work, chunk, corpus.keys, spec)

    pool = ProcessPoolExecutor(
        spec.num_workers,
        # A fresh interpreter: forking a process whose tokenizer library has started threads may hang.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
    )
    try:
        yield from _in_order(map(submit, chunks), spec.num_workers * CHUNKS_AHEAD)
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


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within, SIGINT and SIGTERM wait: they would leave a file that nobody drops, or a worker half started.

    Workers begin with both blocked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    # Other threads may receive a signal that this one blocks, so both are needed.
    handlers = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in STOPS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for stop in caught:
        signal.raise_signal(stop)


def _begin_worker() -> None:
    """An interrupt is the parent's business; and when the parent was killed, nobody else ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os._exit(1)


def _work(chunk: Chunk, keys: tuple[str, ...], spec: PrepareSpec) -> Encoded:
    return encode_chunk(chunk, keys, spec, _opened_once(spec.tokenizer))


@functools.lru_cache(maxsize=1)
def _opened_once(spec: TokenizerSpec) -> Tokenizer:
    return open_tokenizer(spec)
