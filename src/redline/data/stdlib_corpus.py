"""The demo corpus: the source text of the running Python's own standard library.

It is installed wherever Redline runs, so a first training run needs no download. Tests and third-party
packages are left out. Files are taken in the order of a hash of their names: any prefix of them, and the
documents at the end that become the validation split, are then a fair sample of the whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from redline.data.cache import digest_of
from redline.data.indexed import IndexedDataset
from redline.data.layout import token_dtype
from redline.data.split import parse_split, split_ranges
from redline.data.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    TokenizerSpec,
    open_tokenizer,
    save_tokenizer,
    train_bpe,
)
from redline.data.unigram import unigram_loss
from redline.data.writer import IndexedWriter
from redline.errors import DataError
from redline.files import os_errors_as, write_json_atomic

EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
FORMAT = 1  # of the cache; raise it when the same sources shall give other files
MANIFEST = "corpus.json"


@dataclass(frozen=True, slots=True)
class StdlibCorpus:
    """The prepared demo corpus.

    Attributes:
        prefix: of the token files, for `--data-path`.
        tokenizer: path of tokenizer.json, for `--tokenizer-model`.
        vocab_size: of the tokenizer.
        eod_id: its end-of-document token.
        num_documents, num_tokens, num_bytes: source files, their tokens (end tokens included), their bytes.
    """

    prefix: str
    tokenizer: str
    vocab_size: int
    eod_id: int
    num_documents: int
    num_tokens: int
    num_bytes: int

    def unigram_loss(self, split: str) -> float:
        """Validation loss, in nats a token, of a unigram model fitted on the training part of `split`."""
        pair = IndexedDataset(self.prefix)
        train, valid, _ = split_ranges(parse_split(split), len(pair))
        train_tokens, valid_tokens = (
            np.concatenate([pair[number] for number in documents]) for documents in (train, valid)
        )
        return unigram_loss(train_tokens, valid_tokens, self.vocab_size)


def stdlib_sources(max_bytes: int) -> list[tuple[str, str]]:
    """(name, text) of the standard library's source files, at most `max_bytes` bytes of them.

    Raises: DataError when this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED]
        here = Path(folder).relative_to(root)
        names += [(here / name).as_posix() for name in files if name.endswith(".py")]
    sources, room = [], max_bytes
    for name in sorted(names, key=lambda name: hashlib.blake2b(name.encode()).digest()):
        try:
            content = (root / name).read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError):  # a few files are in other encodings on purpose
            continue
        if len(content) > room:  # filling up with what still fits would leave the end to tiny files
            break
        if text:
            sources.append((name, text))
            room -= len(content)
    if not sources:
        raise DataError(
            f"{root} holds no Python source text.",
            why="the demo trains on the standard library's own sources, which this Python lacks.",
            mend="name a corpus with --data-path, or use a Python that has its .py files.",
        )
    return sources


def prepare_stdlib_corpus(
    cache_folder: Path,
    *,
    vocab_size: int,
    max_bytes: int,
    report: Callable[[str], object] = lambda message: None,
) -> StdlibCorpus:
    """The demo corpus in `cache_folder`: found there whole, or made (in seconds).

    Args:
        cache_folder: gets one subfolder for each content and vocabulary.
        vocab_size: entries of the byte-level BPE trained on the corpus.
        max_bytes: most source text taken.
        report: called with what is being done.
    Raises: DataError when there are no sources or the folder cannot be written.
    """
    sources = stdlib_sources(max_bytes)
    folder = cache_folder / f"stdlib-{digest_of(FORMAT, vocab_size, sources)}"
    found = _find(folder)
    if found is not None:
        return found
    texts = [text for _, text in sources]
    report(f"training a tokenizer of {vocab_size} entries on {len(texts)} files of Python's standard library")
    inner = train_bpe(texts, vocab_size)
    with os_errors_as(DataError, folder, "write into"):
        folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(inner, folder / "tokenizer.json")
    tokenizer = BpeTokenizer(inner, END_OF_TEXT)
    assert tokenizer.eod_id is not None, "train_bpe adds it"
    report("encoding the corpus")
    prefix = folder / "corpus_text_document"
    num_tokens = 0
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size), overwrite=True) as writer:
        for text in texts:
            ids = [*tokenizer.encode(text), tokenizer.eod_id]
            writer.add_document(ids)
            num_tokens += len(ids)
    corpus = StdlibCorpus(
        prefix=str(prefix),
        tokenizer=str(folder / "tokenizer.json"),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        num_documents=len(texts),
        num_tokens=num_tokens,
        num_bytes=sum(len(text.encode()) for text in texts),
    )
    with os_errors_as(DataError, folder, "write into"):
        write_json_atomic(folder / MANIFEST, asdict(corpus))  # last: it marks the folder as whole
    return corpus


def _find(folder: Path) -> StdlibCorpus | None:
    """The corpus of an earlier run, None when it is not there or not whole."""
    try:
        kept = json.loads((folder / MANIFEST).read_text())
        # The folder may have been moved since.
        kept |= {"prefix": str(folder / "corpus_text_document"), "tokenizer": str(folder / "tokenizer.json")}
        corpus = StdlibCorpus(**kept)
        pair = IndexedDataset(corpus.prefix)
        spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=corpus.tokenizer)
        tokenizer = open_tokenizer(spec)
    except (OSError, ValueError, TypeError, DataError):
        return None
    whole = pair.num_tokens == corpus.num_tokens and tokenizer.vocab_size == corpus.vocab_size
    return corpus if whole else None
