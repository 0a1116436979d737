"""Tokens from files to microbatches: token files, sampling, blending, tokenizers, preparation.

Nothing here imports torch before the first microbatch is made: preparing and inspecting data start at once.
"""

from redline.data.blend import parse_blend
from redline.data.indexed import IndexedDataset
from redline.data.microbatch import BatchFormat, Microbatch
from redline.data.open import DataSplits, PartReport, open_data
from redline.data.origin import note_fault, tokenizer_beside
from redline.data.prefetch import Prefetcher, prefetch
from redline.data.source import Source
from redline.data.spec import DataSpec
from redline.data.stdlib_corpus import StdlibCorpus, prepare_stdlib_corpus
from redline.data.tokenizer import Tokenizer, TokenizerSpec, open_tokenizer, require_eod
from redline.data.unigram import unigram_loss
from redline.data.writer import IndexedWriter

__all__ = [
    "BatchFormat",
    "DataSpec",
    "DataSplits",
    "IndexedDataset",
    "IndexedWriter",
    "Microbatch",
    "PartReport",
    "Prefetcher",
    "Source",
    "StdlibCorpus",
    "Tokenizer",
    "TokenizerSpec",
    "note_fault",
    "open_data",
    "open_tokenizer",
    "parse_blend",
    "prefetch",
    "prepare_stdlib_corpus",
    "require_eod",
    "tokenizer_beside",
    "unigram_loss",
]
