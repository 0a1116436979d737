"""The vocabulary of a run: from the tokenizer that made the data, or from a bare size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from redline.config import RunConfig, TokenizerConfig
from redline.data import TokenizerSpec, note_fault, open_tokenizer, tokenizer_beside
from redline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Its true size, and the end-of-document token where one is known.

    Attributes:
        notices: what to tell the user about how it was found.
    """

    size: int
    eod_id: int | None
    notices: tuple[str, ...] = ()


def open_vocabulary(config: RunConfig, prefixes: Iterable[str]) -> Vocabulary:
    """The vocabulary that the options name; where they name no tokenizer, the one noted beside the data.

    Args:
        prefixes: of the token files.

    Raises: ConfigError when nothing says how large it is, when the model's is smaller than the tokenizer's,
        when the data sets were made with different tokenizers, or --eod-token has no tokenizer.
    """
    model_size, prefixes = config.model.vocab_size, tuple(prefixes)
    spec, faults = _named(config.tokenizer, model_size), list[str]()
    if spec is None:
        spec = _beside(prefixes, config.tokenizer.eod_token)
        faults = [fault for prefix in prefixes if (fault := note_fault(prefix)) is not None]
    notices = tuple(f"{fault}; it is ignored." for fault in faults)
    if spec is None and config.tokenizer.eod_token is not None:
        raise ConfigError(
            f"--eod-token {config.tokenizer.eod_token}: there is no tokenizer that could have it.",
            why="none is named, and none is noted beside the data.",
            mend="name one, for example --tokenizer-model tokenizer.json, or leave --eod-token out.",
        )
    if spec is None:
        if model_size is None:
            raise ConfigError(
                "the size of the vocabulary is not known.",
                why="".join(f"{fault}; " for fault in faults)
                + "no tokenizer is named or noted beside the data, and no preset or --vocab-size says it.",
                mend="add --tokenizer-model tokenizer.json, or --vocab-size N.",
            )
        return Vocabulary(model_size, None, notices)
    tokenizer = open_tokenizer(spec)
    if spec.tokenizer_type == "NullTokenizer" or model_size is None:
        return Vocabulary(tokenizer.vocab_size, tokenizer.eod_id, notices)
    if model_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {model_size} is smaller than the tokenizer's vocabulary, {tokenizer.vocab_size}.",
            why="tokens beyond it would have no embedding.",
            mend=f"use --vocab-size {tokenizer.vocab_size} or more, or leave it out.",
        )
    return Vocabulary(model_size, tokenizer.eod_id, notices)


def _named(options: TokenizerConfig, vocab_size: int | None) -> TokenizerSpec | None:
    """The tokenizer that the options name; its type follows from the files given where it is not stated."""
    kind = options.tokenizer_type
    if kind is None:
        kind = (
            "HuggingFaceTokenizer"
            if options.tokenizer_model
            else "GPT2BPETokenizer"
            if options.vocab_file
            else None
        )
    if kind is None:
        return None
    return TokenizerSpec(
        tokenizer_type=kind,
        tokenizer_model=options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        vocab_size=vocab_size,
        eod_token=options.eod_token,
    )


def _beside(prefixes: Iterable[str], eod_token: str | None) -> TokenizerSpec | None:
    """The one tokenizer that the data sets name, None where they name none; `eod_token` over what it says."""
    found = {prefix: spec for prefix in prefixes if (spec := tokenizer_beside(prefix)) is not None}
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"the data sets {', '.join(found)} were made with different tokenizers.",
            why="the same token id would mean different things.",
            mend="prepare them with one tokenizer, or name one with --tokenizer-model if they agree.",
        )
    spec = next(iter(found.values()), None)
    return replace(spec, eod_token=eod_token) if spec is not None and eod_token is not None else spec
