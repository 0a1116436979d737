"""`redline data prepare` and `redline data inspect`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from redline.data.corpus import FORMATS, Corpus, find_corpus, texts_of
from redline.data.inspection import inspect
from redline.data.prepare import PrepareSpec, prepare
from redline.data.tokenizer import (
    TOKENIZER_TYPES,
    TokenizerSpec,
    open_tokenizer,
    save_tokenizer,
    train_bpe,
)
from redline.data.writer import refuse_existing
from redline.errors import ConfigError, UsageError


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}.", mend=f"see `{self.prog} --help`.")


def main(argv: list[str]) -> int:
    """Run `redline data ...`; returns the exit code, raises RedlineError."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="redline data",
        description="Prepare text, JSONL or Parquet for training; look into prepared data.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_prepare(verbs.add_parser("prepare", allow_abbrev=False, help="corpus -> .bin/.idx token files"))
    _add_inspect(verbs.add_parser("inspect", allow_abbrev=False, help="what a .bin/.idx pair holds"))
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Encode documents into PREFIX_KEY_document.bin and .idx, Megatron-LM's format. A text file is one "
        "document; a JSON lines file (also .gz) or a Parquet file holds one a line or row. Folders are "
        "searched with all their subfolders."
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file, folder or quoted pattern such as 'src/**/*.c'")
    add("--output-prefix", required=True, metavar="PREFIX", help="where the token files go")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="JSON keys or columns (text)")
    add("--input-format", choices=FORMATS, default="auto", help="default: by the file's suffix")
    _add_tokenizer(parser)
    add(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB_SIZE",
        help="train a byte-level BPE on the input first; it is written to PREFIX_tokenizer.json",
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
        help="leave out and count malformed lines, rows and files instead of stopping",
    )
    add("--workers", type=_at_least_one, metavar="N", help="processes (default: one a core)")
    add("--overwrite", action="store_true", help="replace existing output")
    parser.set_defaults(run=_prepare)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = "Verify a pair of token files, and print counts, lengths and the first documents."
    parser.add_argument("prefix", metavar="PREFIX", help="path without .bin or .idx")
    _add_tokenizer(parser)
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="documents shown (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_inspect)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    add("--tokenizer-model", metavar="PATH", help="HuggingFaceTokenizer: tokenizer.json or its folder")
    add("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json")
    add("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt")
    add("--vocab-size", type=_at_least_one, metavar="N", help="NullTokenizer: number of ids")
    add("--eod-token", metavar="TOKEN", help="the end-of-document token, when the files do not name it")


def _at_least_one(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is below 1")
    return number


def _tokenizer_spec(args: argparse.Namespace) -> TokenizerSpec | None:
    """The tokenizer that the options name; a model or vocabulary alone implies its type."""
    implied = {
        "HuggingFaceTokenizer": args.tokenizer_model,
        "GPT2BPETokenizer": args.vocab_file or args.merge_file,
    }
    kind = args.tokenizer_type or next((name for name, given in implied.items() if given), None)
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


def _prepare(args: argparse.Namespace) -> int:
    tokenizer = _tokenizer_spec(args)
    if (tokenizer is None) == (args.train_tokenizer is None):
        raise ConfigError(
            "no tokenizer is named." if tokenizer is None else "--train-tokenizer excludes a given one.",
            why="text becomes token ids by exactly one tokenizer.",
            mend="give --tokenizer-model PATH (or another --tokenizer-type), or --train-tokenizer SIZE.",
        )
    corpus = find_corpus(args.inputs, keys=args.json_keys, input_format=args.input_format)
    prefix = Path(args.output_prefix)
    if tokenizer is None:
        tokenizer = _train_tokenizer(corpus, prefix, args)
    spec = PrepareSpec(
        tokenizer=tokenizer,
        append_eod=args.append_eod,
        skip_bad=args.skip_bad_lines,
        num_workers=args.workers or _num_cores(),
        overwrite=args.overwrite,
    )
    with _progress("encoding", corpus.num_bytes) as advance:
        report = prepare(corpus, prefix, spec, progress=advance)
    for key, path in report.prefixes.items():
        documents, tokens = report.num_documents[key], report.num_tokens[key]
        print(f"{path}: {documents:,} documents, {tokens:,} tokens of {report.dtype}")
    if report.num_empty or report.num_bad:
        print(f"left out: {report.num_empty:,} empty, {report.num_bad:,} malformed documents")
    print(
        f"train with: --data-path {' '.join(map(str, report.prefixes.values()))}{_tokenizer_flags(tokenizer)}"
    )
    return 0


def _num_cores() -> int:
    """Cores this process may use; only Linux tells them from all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenizer_flags(spec: TokenizerSpec) -> str:
    """The options that name this tokenizer again."""
    values = {
        "--tokenizer-type": spec.tokenizer_type,
        "--tokenizer-model": spec.tokenizer_model,
        "--vocab-file": spec.vocab_file,
        "--merge-file": spec.merge_file,
        "--vocab-size": spec.vocab_size,
    }
    return "".join(f" {flag} {value}" for flag, value in values.items() if value is not None)


def _train_tokenizer(corpus: Corpus, prefix: Path, args: argparse.Namespace) -> TokenizerSpec:
    path = prefix.with_name(f"{prefix.name}_tokenizer.json")
    if not args.overwrite:
        refuse_existing(path)
    with _progress("training the tokenizer", corpus.num_bytes) as advance:

        def texts() -> Iterator[str]:
            for chunk in corpus.chunks():
                for documents in texts_of(chunk, corpus.keys, skip_bad=args.skip_bad_lines).by_key.values():
                    yield from documents
                advance(chunk.num_bytes)

        trained = train_bpe(texts(), args.train_tokenizer)
    save_tokenizer(trained, path)
    print(f"{path}: {trained.get_vocab_size():,} entries")
    return TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))


def _inspect(args: argparse.Namespace) -> int:
    spec = _tokenizer_spec(args)
    tokenizer = None if spec is None else open_tokenizer(spec)
    found = inspect(args.prefix, tokenizer, num_documents=args.documents)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.as_text())
    return 0


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
