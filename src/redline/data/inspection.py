"""What a prepared pair holds: `redline data inspect`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redline.data.indexed import IndexedDataset
from redline.data.origin import note_fault
from redline.data.tokenizer import Tokenizer
from redline.errors import DataError
from redline.units import format_bytes

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
BLOCK_TOKENS = 1 << 24
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts of one pair.

    Attributes:
        prefix, dtype, num_bytes: of the files; bytes of both together.
        num_documents, num_sequences, num_tokens: counts; num_empty documents hold no token.
        mean_length: tokens a sequence.
        percentiles: percent -> tokens a sequence.
        histogram: (lower bound, upper bound exclusive, sequences) by powers of two.
        min_id, max_id: smallest and largest token, None for an empty pair.
        num_end_tokens: sequences that end with the tokenizer's end-of-document token, None without a
            tokenizer.
        documents: the first documents, decoded (or as ids without a tokenizer).
        note_fault: without a tokenizer, why the file where one is noted names none.
    """

    prefix: str
    dtype: str
    num_bytes: int
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_empty: int
    mean_length: float
    percentiles: dict[int, int]
    histogram: list[tuple[int, int, int]]
    min_id: int | float | None
    max_id: int | float | None
    num_end_tokens: int | None
    documents: list[str]
    note_fault: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """The facts for a terminal."""
        lines = [
            f"{self.prefix}: {self.num_tokens:,} tokens of {self.dtype}, {format_bytes(self.num_bytes)}",
            f"documents    {self.num_documents:,}",
            f"sequences    {self.num_sequences:,} ({self.num_empty:,} empty)",
            f"token ids    {self.min_id} to {self.max_id}",
            "verified     header, sizes, offsets, document boundaries and every token id",
        ]
        if self.num_end_tokens is not None:
            lines.append(f"end tokens   {self.num_end_tokens:,} sequences end with one")
        if self.note_fault is not None:
            lines.append(f"tokenizer    not known, documents are shown as ids: {self.note_fault}")
        if self.num_sequences:
            names = {0: "least", 50: "median", 100: "most"}
            shown = (f"{names.get(rank, f'{rank}%')} {length:,}" for rank, length in self.percentiles.items())
            lines.append(f"lengths      mean {self.mean_length:,.1f}, {', '.join(shown)}")
        most = max((count for _, _, count in self.histogram), default=0)
        for low, high, count in self.histogram:
            bar = "#" * -(-count * BAR_WIDTH // most)
            lines.append(f"{low:>10,} to {high - 1:<10,} {count:>12,} {bar}")
        for number, text in enumerate(self.documents):
            lines += [f"--- document {number}", text]
        return "\n".join(lines)


def inspect(
    prefix: str | Path, tokenizer: Tokenizer | None = None, *, num_documents: int = 3, max_tokens: int = 200
) -> Inspection:
    """Read and verify one pair.

    Args:
        prefix: the pair.
        tokenizer: decodes the first documents, and bounds the ids.
        num_documents: documents shown; of each at most `max_tokens` tokens.
    Raises: DataError when the pair is damaged or holds ids outside the tokenizer's vocabulary.
    """
    pair = IndexedDataset(prefix)
    lengths = pair.lengths
    low, high = _id_range(pair)
    if tokenizer is not None and pair.num_tokens and not 0 <= low <= high < tokenizer.vocab_size:
        raise DataError(
            f"{pair.bin_path} holds token ids {low} to {high}.",
            why=f"the tokenizer has {tokenizer.vocab_size} entries: the data was made with another one.",
            mend="name the tokenizer that the data was prepared with.",
        )
    shown = PERCENTILES if len(lengths) else ()
    return Inspection(
        prefix=str(pair.prefix),
        dtype=pair.dtype.name,
        num_bytes=sum(
            pair.prefix.with_name(pair.prefix.name + end).stat().st_size for end in (".bin", ".idx")
        ),
        num_documents=pair.num_documents,
        num_sequences=pair.num_sequences,
        num_tokens=pair.num_tokens,
        num_empty=int((lengths == 0).sum()),
        mean_length=pair.num_tokens / max(len(lengths), 1),
        percentiles={percent: int(np.percentile(lengths, percent, method="lower")) for percent in shown},
        histogram=_histogram(lengths),
        min_id=low if pair.num_tokens else None,
        max_id=high if pair.num_tokens else None,
        num_end_tokens=None if tokenizer is None else _count_end_tokens(pair, tokenizer),
        documents=[
            _show(pair, number, tokenizer, max_tokens) for number in range(min(num_documents, len(pair)))
        ],
        note_fault=None if tokenizer is not None else note_fault(prefix),
    )


def _id_range(pair: IndexedDataset) -> tuple[int | float, int | float]:
    """Smallest and largest token of the file, read block by block; 0 and 0 for an empty one."""
    lows: list[int | float] = []
    highs: list[int | float] = []
    tokens = np.memmap(pair.bin_path, pair.dtype, mode="r") if pair.num_tokens else np.empty(0, pair.dtype)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        lows.append(block.min().item())
        highs.append(block.max().item())
    return min(lows, default=0), max(highs, default=0)


def _histogram(lengths: np.ndarray[Any, np.dtype[np.int32]]) -> list[tuple[int, int, int]]:
    """Sequences by length: [1, 2), [2, 4), [4, 8), ...; empty ones apart, empty bins at the ends left out."""
    if not len(lengths):
        return []
    bins = np.bincount(np.frexp(lengths)[1])  # the bin of a length is its number of binary digits
    used = np.flatnonzero(bins)
    return [(2**b // 2, 2**b, int(bins[b])) for b in range(used[0], used[-1] + 1)]


def _count_end_tokens(pair: IndexedDataset, tokenizer: Tokenizer) -> int:
    held = np.flatnonzero(pair.lengths)
    last = pair.gather(held, pair.lengths[held] - 1, np.ones(len(held), np.int64))
    return int((last == tokenizer.eod_id).sum()) if tokenizer.eod_id is not None else 0


def _show(pair: IndexedDataset, number: int, tokenizer: Tokenizer | None, max_tokens: int) -> str:
    ids = pair[number][:max_tokens].tolist()
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
    rest = int(pair.lengths[number]) - len(ids)
    return f"{text} ... ({rest:,} more tokens)" if rest else text
