"""`redline data prepare` and `redline data inspect`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from redline.cli.parser import Parser, at_least
from redline.config.problems import nearest
from redline.data.corpus import FORMATS, Corpus, find_corpus, texts_of
from redline.data.indexed import IndexedDataset
from redline.data.inspection import inspect
from redline.data.origin import tokenizer_beside
from redline.data.prepare import PrepareSpec, output_prefixes, prepare
from redline.data.tokenizer import (
    TOKENIZER_TYPES,
    Tokenizer,
    TokenizerSpec,
    check_vocab_size,
    open_tokenizer,
    save_tokenizer,
    train_bpe,
)
from redline.data.writer import refuse_existing
from redline.errors import ConfigError, DataError, UsageError

USAGE = """\
Turn text into the token files that training reads, and look into such files.

usage: redline data prepare INPUT ... --output-prefix PREFIX [options]
       redline data inspect PREFIX [options]

  prepare  text files, JSON lines or Parquet -> PREFIX_text_document.bin and .idx (Megatron-LM's format)
  inspect  verify a .bin/.idx pair; print counts, lengths and the first documents

`redline data prepare --help` lists its options.

examples:
  redline data prepare corpus/ --train-tokenizer 16384 --output-prefix data/mine
  redline data inspect data/mine_text_document"""

PREPARE_EXAMPLES = """\
examples:
  redline data prepare corpus/ --train-tokenizer 16384 --output-prefix data/mine
  redline data prepare 'src/**/*.c' --tokenizer-model llama3/tokenizer.json --output-prefix data/c
  redline train --data-path data/mine_text_document"""

INSPECT_EXAMPLES = """\
examples:
  redline data inspect data/mine_text_document
  redline data inspect data/mine_text_document --documents 0 --json"""


# What each kind of tokenizer reads.
READ_BY: dict[str | None, tuple[str, ...]] = {
    "HuggingFaceTokenizer": ("tokenizer_model", "eod_token"),
    "GPT2BPETokenizer": ("vocab_file", "merge_file", "eod_token"),
    "ByteTokenizer": (),
    "NullTokenizer": ("vocab_size",),
}


def main(argv: Sequence[str]) -> int:
    """Run `redline data ...`; returns the exit code, raises RedlineError."""
    verb, *words = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if verb not in VERBS:
        known = nearest(verb, VERBS)
        raise UsageError(
            f"redline data has no verb {verb!r}.",
            why=f"the verbs are {' and '.join(VERBS)}.",
            mend=f"did you mean `redline data {known}`?" if known else "see `redline data --help`.",
        )
    make_parser, run = VERBS[verb]
    parser = make_parser()
    if "-h" in words or "--help" in words:
        print(parser.format_help(), end="")
        return 0
    return run(parser.parse(words))


def _prepare_parser() -> Parser:
    parser = Parser(
        "redline data prepare",
        usage="redline data prepare INPUT ... --output-prefix PREFIX [options]\n"
        "       with one of --train-tokenizer SIZE, --tokenizer-model PATH, --tokenizer-type TYPE",
        description="Encode documents as token ids: PREFIX_KEY_document.bin and .idx, Megatron-LM's format.\n"
        "A text file is one document; a JSON lines file (also .gz) holds one a line, a Parquet\n"
        "file one a row. Folders are searched with all their subfolders.",
        epilog=PREPARE_EXAMPLES,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file, folder or quoted pattern such as 'src/**/*.c'")
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="folder and first part of the name of the output",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="JSON keys or Parquet columns that hold text; each gives files of its own (default: text)",
    )
    add(
        "--input-format",
        choices=FORMATS,
        default="auto",
        help="format of all inputs (default: auto, by suffix)",
    )
    _add_tokenizer(parser)
    add(
        "--train-tokenizer",
        type=at_least(1),
        metavar="SIZE",
        help="first train a tokenizer of SIZE entries (byte-level BPE) on the input: PREFIX_tokenizer.json",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document token (default: on)",
    )
    add(
        "--skip-bad-lines",
        action="store_true",
        help="leave out and count malformed lines, rows and files instead of stopping at the first",
    )
    add(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="processes that encode (default: one for each core)",
    )
    add("--overwrite", action="store_true", help="replace existing output")
    return parser


def _inspect_parser() -> Parser:
    parser = Parser(
        "redline data inspect",
        usage="redline data inspect PREFIX [options]",
        description="Verify a pair of token files; print counts, lengths and the first documents, decoded\n"
        "by the tokenizer noted when the pair was prepared, or by the one named here.",
        epilog=INSPECT_EXAMPLES,
    )
    parser.add_argument("prefix", metavar="PREFIX", help="path of the pair without .bin or .idx")
    _add_tokenizer(parser)
    parser.add_argument(
        "--documents",
        type=at_least(0),
        default=3,
        metavar="N",
        help="documents to show (default: 3)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokenizer").add_argument
    add(
        "--tokenizer-type",
        metavar="TYPE",
        help=f"{', '.join(TOKENIZER_TYPES)} (default: by the files given)",
    )
    add("--tokenizer-model", metavar="PATH", help="HuggingFaceTokenizer: tokenizer.json, or its folder")
    add("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json")
    add("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt")
    add("--vocab-size", type=at_least(1), metavar="N", help="NullTokenizer (text of numbers): how many ids")
    add("--eod-token", metavar="TOKEN", help="the end-of-document token (default: what the files say)")


def _tokenizer_spec(args: argparse.Namespace, beside: tuple[str, ...] = ()) -> TokenizerSpec | None:
    """The tokenizer that the options name; a model or vocabulary alone implies its type.

    Args:
        beside: options that have a use without a named tokenizer.
    """
    implied = {
        "HuggingFaceTokenizer": args.tokenizer_model,
        "GPT2BPETokenizer": args.vocab_file or args.merge_file,
    }
    kind = args.tokenizer_type or next((name for name, given in implied.items() if given), None)
    _refuse_unread(args, kind, READ_BY.get(kind, beside))
    if kind is None:
        return None
    return TokenizerSpec(
        tokenizer_type=kind,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        eod_token=args.eod_token,
    )


def _refuse_unread(args: argparse.Namespace, kind: str | None, read: tuple[str, ...]) -> None:
    """Raise ConfigError when an option is given that this kind of tokenizer would not read."""
    unread = [
        "--" + name.replace("_", "-")
        for name in ("tokenizer_model", "vocab_file", "merge_file", "vocab_size", "eod_token")
        if getattr(args, name) is not None and name not in read
    ]
    if unread:
        raise ConfigError(
            f"{' and '.join(unread)} would not be read{f' by {kind}' if kind else ''}.",
            why="each kind of tokenizer reads its own options and no others.",
            mend="leave it out, or name the --tokenizer-type that reads it.",
        )


def _prepare(args: argparse.Namespace) -> int:
    named = _tokenizer_spec(args)
    if (named is None) == (args.train_tokenizer is None):
        raise ConfigError(
            "no tokenizer is named." if named is None else "--train-tokenizer excludes a given one.",
            why="text becomes token ids by exactly one tokenizer.",
            mend="give --tokenizer-model PATH (or another --tokenizer-type), or --train-tokenizer SIZE.",
        )
    prefix = _output_prefix(args.output_prefix)
    corpus = find_corpus(args.inputs, keys=args.json_keys, input_format=args.input_format)
    with _tokenizer(named, corpus, prefix, args) as (tokenizer, target):
        spec = PrepareSpec(
            tokenizer=tokenizer,
            append_eod=args.append_eod,
            skip_bad=args.skip_bad_lines,
            num_workers=args.workers or _num_cores(),
            overwrite=args.overwrite,
            tokenizer_target=target,
        )
        with _progress("encoding", corpus.num_bytes) as advance:
            report = prepare(corpus, prefix, spec, progress=advance)
    for key, path in report.prefixes.items():
        documents, tokens = report.num_documents[key], report.num_tokens[key]
        print(f"{path}: {documents:,} documents, {tokens:,} tokens of {report.dtype}")
    if report.num_empty or report.num_bad:
        print(f"left out: {report.num_empty:,} empty, {report.num_bad:,} malformed documents")
    words = ["--data-path", *map(str, report.prefixes.values()), *_tokenizer_flags(report.tokenizer)]
    print(f"train with: redline train {shlex.join(words)}")
    return 0


def _output_prefix(given: str) -> Path:
    if given.endswith(os.sep) or Path(given).name in ("", ".."):
        raise ConfigError(
            f"--output-prefix {given} names a folder.",
            why="the names of the files begin with the prefix.",
            mend=f"add a name, for example --output-prefix {os.path.join(given, 'corpus')}.",
        )
    return Path(given)


def _num_cores() -> int:
    """Cores this process may use; only Linux tells them from all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenizer_flags(spec: TokenizerSpec) -> list[str]:
    """The options that name this tokenizer again."""
    values = {
        "--tokenizer-type": spec.tokenizer_type,
        "--tokenizer-model": spec.tokenizer_model,
        "--vocab-file": spec.vocab_file,
        "--merge-file": spec.merge_file,
        "--vocab-size": spec.vocab_size,
        "--eod-token": spec.eod_token,
    }
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


@contextmanager
def _tokenizer(
    named: TokenizerSpec | None, corpus: Corpus, prefix: Path, args: argparse.Namespace
) -> Iterator[tuple[TokenizerSpec, Path | None]]:
    """(the tokenizer, where its file goes once the data is written): the named one, or one trained now.

    A trained one lies under a hidden name until then, and is gone if the data did not come about.
    """
    if named is not None:
        yield named, None
        return
    check_vocab_size(args.train_tokenizer)
    target = prefix.with_name(f"{prefix.name}_tokenizer.json")
    if not args.overwrite:
        refuse_existing(target)
    output_prefixes(prefix, corpus.keys, overwrite=args.overwrite)  # refuse before the work, not after it
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        entries = _train_tokenizer(corpus, aside, args)
        yield TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(aside)), target
        print(f"{target}: {entries:,} entries")
    finally:
        aside.unlink(missing_ok=True)


def _train_tokenizer(corpus: Corpus, path: Path, args: argparse.Namespace) -> int:
    """Train a tokenizer on the corpus and write it to `path`; returns its number of entries."""
    with _progress("training the tokenizer", corpus.num_bytes) as advance:

        def texts() -> Iterator[str]:
            for chunk in corpus.chunks():
                for documents in texts_of(chunk, corpus.keys, skip_bad=args.skip_bad_lines).by_key.values():
                    yield from documents
                advance(chunk.num_bytes)

        trained = train_bpe(texts(), args.train_tokenizer)
    save_tokenizer(trained, path)
    return trained.get_vocab_size()


def _inspect(args: argparse.Namespace) -> int:
    named = _tokenizer_spec(args, beside=("eod_token",))
    IndexedDataset(args.prefix)  # a damaged pair is what is wrong then, not its tokenizer
    tokenizer = open_tokenizer(named) if named is not None else _tokenizer_beside(args)
    found = inspect(args.prefix, tokenizer, num_documents=args.documents)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.as_text())
    return 0


def _tokenizer_beside(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer noted beside the pair, None where there is none or it cannot be opened."""
    try:
        spec = tokenizer_beside(args.prefix)
        if spec is None:
            return None
        return open_tokenizer(replace(spec, eod_token=args.eod_token or spec.eod_token))
    except DataError as error:
        print(f"{error.what} Documents are shown as ids.", file=sys.stderr)
        return None


# verb -> (its options, what it does)
VERBS: dict[str, tuple[Callable[[], Parser], Callable[[Any], int]]] = {
    "prepare": (_prepare_parser, _prepare),
    "inspect": (_inspect_parser, _inspect),
}


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], object]]:
    """A progress bar over bytes of input, on stderr; silent when that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda done: bar.advance(task, done)
