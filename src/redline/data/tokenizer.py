"""Text to token ids and back.

Four kinds, by Megatron-LM's names: `HuggingFaceTokenizer` (a tokenizer.json, or a folder that holds one),
`GPT2BPETokenizer` (vocab.json and merges.txt), `ByteTokenizer` (the 256 bytes) and `NullTokenizer` (ids
written as numbers). None of them reaches for the network, and none adds tokens of its own: an end-of-document
token is added where documents are written, once. Byte-level BPE is the `tokenizers` library's, imported when
one is opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from redline.errors import ConfigError, DataError
from redline.files import os_errors_as, write_text_atomic

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# Tried in turn when a tokenizer.json comes without a configuration that names its end token.
KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[EOS]")


class Tokenizer(Protocol):
    """What the data room needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""
        ...

    @property
    def eod_id(self) -> int | None:
        """The end-of-document token, None when there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer as the options name it.

    Attributes:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: HuggingFaceTokenizer: a tokenizer.json or a folder with one.
        vocab_file, merge_file: GPT2BPETokenizer: vocab.json and merges.txt.
        vocab_size: NullTokenizer: ids below this; the end-of-document token is one more.
        eod_token: the end-of-document token by name, over what the files say.
    """

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    eod_token: str | None = None


class BpeTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        inner: the library's tokenizer.
        eod_token: its end-of-document token by name; None when unknown.
    """

    def __init__(self, inner: tokenizers.Tokenizer, eod_token: str | None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod_id: int | None = None if eod_token is None else inner.token_to_id(eod_token)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens written out in it are recognised."""
        # The "fast" call leaves out character offsets, a third of the work.
        ids: list[int] = self.inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False))


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a document."""

    vocab_size = 257
    eod_id: int | None = 256

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some bytes; an end of document shows by name, a broken character as a replacement."""
        runs = [bytearray()]
        for token in ids:
            if token < 256:
                runs[-1].append(token)
            else:
                runs.append(bytearray())
        return END_OF_TEXT.join(run.decode(errors="replace") for run in runs)


class NullTokenizer:
    """Texts are ids already, written as numbers; `num_ids` itself ends a document, as in Megatron-LM."""

    def __init__(self, num_ids: int) -> None:
        self.vocab_size = num_ids + 1
        self.eod_id: int | None = num_ids

    def encode(self, text: str) -> list[int]:
        """ "1 2 3" -> [1, 2, 3]. Raises: DataError for anything but numbers below the vocabulary's size."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                f"NullTokenizer: {error}.",
                why="it reads token ids written as whole numbers.",
                mend="use another --tokenizer-type for text.",
            ) from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            outside = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise DataError(
                f"NullTokenizer: id {outside} is outside the vocabulary.",
                why=f"--vocab-size {self.vocab_size - 1} allows 0 to {self.vocab_size - 1}.",
                mend="raise --vocab-size." if outside > 0 else "write ids from 0 on.",
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """[1, 2, 3] -> "1 2 3"."""
        return " ".join(map(str, ids))


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Open the tokenizer that the options name.

    Raises: ConfigError for an unknown type or missing options; DataError for files that cannot be read.
    """
    if spec.tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(
            f"--tokenizer-type {spec.tokenizer_type} is not available.",
            why=f"the types are {', '.join(TOKENIZER_TYPES)}.",
            mend="use HuggingFaceTokenizer with a tokenizer.json; most tokenizers are published as one.",
        )
    if spec.eod_token is not None and spec.tokenizer_type in ("ByteTokenizer", "NullTokenizer"):
        raise ConfigError(
            f"--eod-token {spec.eod_token!r}: the data's {spec.tokenizer_type} has no tokens by name.",
            why="its end-of-document token is the last id.",
            mend="leave --eod-token out.",
        )
    tokenizer = TOKENIZER_TYPES[spec.tokenizer_type](spec)
    if spec.eod_token is not None and tokenizer.eod_id is None:
        raise ConfigError(
            f"--eod-token {spec.eod_token!r} is not in the tokenizer's vocabulary.",
            mend="name a token of the vocabulary, spelled as in tokenizer.json.",
        )
    return tokenizer


def require_eod(tokenizer: Tokenizer, wanted_by: str) -> int:
    """The end-of-document id. Raises: ConfigError, naming the option, when there is none."""
    if tokenizer.eod_id is None:
        raise ConfigError(
            f"{wanted_by}: the tokenizer names no end-of-document token.",
            why="neither its files nor the options say which token ends a document.",
            mend="name one of its tokens with --eod-token, or prepare with --no-append-eod.",
        )
    return tokenizer.eod_id


def train_bpe(texts: Iterable[str], vocab_size: int, *, show_progress: bool = False) -> tokenizers.Tokenizer:
    """Train a byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: any texts; every byte is representable whatever they hold.
        vocab_size: entries wanted, 257 (256 bytes and the end-of-document token, id 0) or more; fewer come
            out when the texts hold fewer distinct pairs.
    Source: Sennrich et al. 2016, arXiv 1508.07909; on bytes: Radford et al. 2019 (GPT-2), section 2.2.
    """
    library = _library()
    check_vocab_size(vocab_size)
    tokenizer = _byte_level(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_vocab_size(vocab_size: int) -> None:
    """Raise ConfigError when a byte-level BPE cannot be that small."""
    if vocab_size < 257:
        raise ConfigError(
            f"a vocabulary of {vocab_size} entries is too small for byte-level BPE.",
            why="256 bytes and the end-of-document token need 257.",
            mend="ask for 257 or more.",
        )


def save_tokenizer(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Write tokenizer.json, whole or not at all. Raises: DataError."""
    with os_errors_as(DataError, path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, tokenizer.to_str(pretty=True))


def _library() -> Any:
    import tokenizers

    return tokenizers


def _byte_level(model: Any) -> tokenizers.Tokenizer:
    library = _library()
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer  # type: ignore[no-any-return]


def _open_hugging_face(spec: TokenizerSpec) -> BpeTokenizer:
    path = Path(_required(spec.tokenizer_model, spec, "--tokenizer-model"))
    folder = path if path.is_dir() else path.parent
    path = path / "tokenizer.json" if path.is_dir() else path
    inner = _read(path, lambda: _library().Tokenizer.from_file(str(path)))
    named = spec.eod_token or _configured_end_token(folder)
    known = (token for token in KNOWN_END_TOKENS if inner.token_to_id(token) is not None)
    return BpeTokenizer(inner, named or next(known, None))


def _configured_end_token(folder: Path) -> str | None:
    """`eos_token` of the configuration files that lie beside a tokenizer.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.is_file():
            token = _read(path, lambda path=path: json.loads(path.read_text())).get("eos_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                return token
    return None


def _open_gpt2(spec: TokenizerSpec) -> BpeTokenizer:
    vocab = Path(_required(spec.vocab_file, spec, "--vocab-file"))
    merges = Path(_required(spec.merge_file, spec, "--merge-file"))
    _read(merges, merges.read_text)  # the library names no file in its errors
    model = _read(vocab, lambda: _library().models.BPE.from_file(str(vocab), str(merges)))
    return BpeTokenizer(_byte_level(model), spec.eod_token or END_OF_TEXT)


def _open_bytes(spec: TokenizerSpec) -> ByteTokenizer:
    return ByteTokenizer()


def _open_null(spec: TokenizerSpec) -> NullTokenizer:
    if not spec.vocab_size:
        raise _missing(spec, "--vocab-size")
    return NullTokenizer(spec.vocab_size)


TOKENIZER_TYPES: dict[str, Callable[[TokenizerSpec], Tokenizer]] = {
    "HuggingFaceTokenizer": _open_hugging_face,
    "GPT2BPETokenizer": _open_gpt2,
    "ByteTokenizer": _open_bytes,
    "NullTokenizer": _open_null,
}


def _required(value: str | None, spec: TokenizerSpec, flag: str) -> str:
    if not value:
        raise _missing(spec, flag)
    return value


def _missing(spec: TokenizerSpec, flag: str) -> ConfigError:
    return ConfigError(f"--tokenizer-type {spec.tokenizer_type} needs {flag}.", mend=f"add {flag}.")


def _read(path: Path, read: Any) -> Any:
    """`read()`, with a missing or unusable file as a DataError that names it."""
    if not path.is_file():
        raise DataError(
            f"there is no tokenizer file {path}.",
            why="tokenizers are read from local files only.",
            mend="name an existing file; `hf download MODEL tokenizer.json` fetches one.",
        )
    try:
        return read()
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(
            f"{path} cannot be read as a tokenizer file: {error}.",
            why="it is cut short, of another kind, or not readable.",
            mend="fetch or write it again.",
        ) from error
