"""Tokenizers: round trips, end-of-document tokens, errors that name the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from redline.data.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    NullTokenizer,
    TokenizerSpec,
    open_tokenizer,
    require_eod,
    save_tokenizer,
    train_bpe,
)
from redline.errors import ConfigError, DataError

TEXTS = ["def sum_of(values):\n    return sum(values)\n", "the sum of the values is the sum"] * 20


def hugging_face(path: Path, **changes: str) -> BpeTokenizer:
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path), **changes)
    tokenizer = open_tokenizer(spec)
    assert isinstance(tokenizer, BpeTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_bpe(TEXTS, 280), path)
    return path


def word_level(path: Path, *words: str) -> Path:
    """A tokenizer.json whose vocabulary is these words."""
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    Tokenizer(model).save(str(path))
    return path


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_every_text_survives(model: Path, text: str) -> None:
    tokenizer = hugging_face(model)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_training_is_repeatable_and_merges(model: Path) -> None:
    again = train_bpe(TEXTS, 280)
    assert json.loads(again.to_str()) == json.loads(model.read_text())
    tokenizer = hugging_face(model)
    assert tokenizer.vocab_size == 280
    assert len(tokenizer.encode(TEXTS[1])) < len(TEXTS[1]) / 2
    assert tokenizer.eod_id == 0 and tokenizer.decode([0]) == END_OF_TEXT


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="256 entries is too small"):
        train_bpe(TEXTS, 256)


def test_a_folder_names_its_end_token(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(model.read_text())
    merged = next(token for token in json.loads(model.read_text())["model"]["vocab"] if len(token) == 3)
    for name, value in (
        ("special_tokens_map.json", merged),
        ("tokenizer_config.json", {"content": merged}),
    ):
        (tmp_path / name).write_text(json.dumps({"eos_token": value}))
        tokenizer = hugging_face(tmp_path)
        assert tokenizer.eod_id == tokenizer.inner.token_to_id(merged) != 0
        (tmp_path / name).unlink()


def test_the_option_goes_before_the_files(model: Path) -> None:
    assert hugging_face(model, eod_token="a").eod_id == hugging_face(model).encode("a")[0]
    with pytest.raises(ConfigError, match="--eod-token '<eos>' is not in the tokenizer's vocabulary"):
        hugging_face(model, eod_token="<eos>")


def test_holes_in_the_vocabulary_count(tmp_path: Path) -> None:
    model = models.WordLevel({"a": 0, "b": 7}, unk_token="a")
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert hugging_face(tmp_path).vocab_size == 8


def test_no_end_token_names_the_option_b108(tmp_path: Path) -> None:
    """B108: a tokenizer without an end token: the message names the option to set."""
    tokenizer = hugging_face(word_level(tmp_path / "tokenizer.json", "a", "b"))
    assert tokenizer.eod_id is None
    with pytest.raises(ConfigError, match=r"(?s)--append-eod: .*--eod-token.*--no-append-eod"):
        require_eod(tokenizer, "--append-eod")
    assert require_eod(hugging_face(tmp_path, eod_token="b"), "--append-eod") == 1


def test_known_end_tokens_are_found(tmp_path: Path) -> None:
    assert hugging_face(word_level(tmp_path / "tokenizer.json", "a", "</s>")).eod_id == 1


def test_gpt2_files_equal_the_tokenizer_they_came_from(model: Path, tmp_path: Path) -> None:
    inner = Tokenizer.from_file(str(model))
    vocab, merges = inner.model.save(str(tmp_path))
    spec = TokenizerSpec(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    tokenizer = open_tokenizer(spec)
    assert tokenizer.encode(TEXTS[0]) == hugging_face(model).encode(TEXTS[0])
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (0, 280)


def test_saved_truncation_does_not_cut_documents(model: Path, tmp_path: Path) -> None:
    inner = Tokenizer.from_file(str(model))
    inner.enable_truncation(3)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert hugging_face(tmp_path).encode(TEXTS[0]) == hugging_face(model).encode(TEXTS[0])
    assert len(hugging_face(tmp_path).encode("a")) == 1


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.decode([104, 105, 256, 255]) == "hi<|endoftext|>\ufffd"


def test_null() -> None:
    spec = TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=10)
    tokenizer = open_tokenizer(spec)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (11, 10)
    assert tokenizer.encode(" 3 1\n10 ") == [3, 1, 10] and tokenizer.encode("") == []
    assert tokenizer.decode([3, 1]) == "3 1"
    for text, says in (("3 11", "NullTokenizer: id 11 is"), ("9 -1", ": id -1 is"), ("a", "'a'")):
        with pytest.raises(DataError, match=says):
            NullTokenizer(10).encode(text)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (TokenizerSpec(tokenizer_type="HuggingFaceTokenizer"), "needs --tokenizer-model"),
        (TokenizerSpec(tokenizer_type="GPT2BPETokenizer"), "needs --vocab-file"),
        (TokenizerSpec(tokenizer_type="GPT2BPETokenizer", vocab_file="v"), "needs --merge-file"),
        (TokenizerSpec(tokenizer_type="NullTokenizer"), "needs --vocab-size"),
        (TokenizerSpec(tokenizer_type="SentencePieceTokenizer"), "the types are HuggingFaceTokenizer"),
    ],
)
def test_missing_options(spec: TokenizerSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_tokenizer(spec)


def test_missing_and_broken_files(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no tokenizer file .*nowhere"):
        hugging_face(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"there is no tokenizer file .*tokenizer\.json"):
        hugging_face(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(model.read_bytes()[:500])
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        hugging_face(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    spec = TokenizerSpec(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )
    with pytest.raises(DataError, match=r"there is no tokenizer file .*merges\.txt"):
        open_tokenizer(spec)
