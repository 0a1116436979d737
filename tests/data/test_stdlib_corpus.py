"""The demo corpus and the unigram baseline."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from redline.data import stdlib_corpus
from redline.data.bench import data_index_case
from redline.data.indexed import IndexedDataset
from redline.data.open import open_data
from redline.data.spec import DataSpec
from redline.data.stdlib_corpus import prepare_stdlib_corpus, stdlib_sources
from redline.data.tokenizer import TokenizerSpec, open_tokenizer
from redline.data.unigram import unigram_loss
from redline.errors import DataError

MAX_BYTES, VOCAB_SIZE = 150_000, 400


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    prepare_stdlib_corpus(folder, vocab_size=VOCAB_SIZE, max_bytes=MAX_BYTES)
    return folder


def again(cache: Path, messages: list[str]) -> stdlib_corpus.StdlibCorpus:
    return prepare_stdlib_corpus(cache, vocab_size=VOCAB_SIZE, max_bytes=MAX_BYTES, report=messages.append)


def test_sources_are_the_library_s_own(cache: Path) -> None:
    sources = stdlib_sources(MAX_BYTES)
    assert sources == stdlib_sources(MAX_BYTES)
    sizes = [len(text.encode()) for _, text in sources]
    assert 0.8 * MAX_BYTES < sum(sizes) <= MAX_BYTES
    assert not any({"site-packages", "test", "tests"} & set(Path(name).parts) for name, _ in sources)
    everything = stdlib_sources(1 << 40)
    assert {name for name, _ in sources} <= {name for name, _ in everything}
    assert "argparse.py" in {name for name, _ in everything}


def test_documents_decode_to_the_sources(cache: Path) -> None:
    corpus = again(cache, [])
    pair = IndexedDataset(corpus.prefix)
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=corpus.tokenizer)
    tokenizer = open_tokenizer(spec)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (corpus.vocab_size, corpus.eod_id)
    sources = stdlib_sources(MAX_BYTES)
    assert len(pair) == corpus.num_documents == len(sources)
    assert pair.num_tokens == corpus.num_tokens
    for tokens, (_, text) in zip(pair, sources, strict=True):
        assert tokens[-1] == corpus.eod_id and tokenizer.decode(tokens[:-1].tolist()) == text


def test_found_again_and_rebuilt_when_damaged(cache: Path) -> None:
    messages: list[str] = []
    corpus = again(cache, messages)
    assert messages == []
    tokens = Path(f"{corpus.prefix}.bin").read_bytes()
    Path(f"{corpus.prefix}.bin").write_bytes(tokens[:-2])
    assert again(cache, messages) == corpus
    assert len(messages) == 2 and Path(f"{corpus.prefix}.bin").read_bytes() == tokens
    (Path(corpus.prefix).parent / "corpus.json").unlink()
    again(cache, messages)
    assert len(messages) == 4


def test_other_parameters_get_their_own_folder(cache: Path, tmp_path: Path) -> None:
    first = prepare_stdlib_corpus(tmp_path, vocab_size=300, max_bytes=20_000)
    second = prepare_stdlib_corpus(tmp_path, vocab_size=310, max_bytes=20_000)
    assert first.prefix != second.prefix and len(list(tmp_path.iterdir())) == 2


def test_no_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="holds no Python source text"):
        stdlib_sources(1000)


def test_an_unusable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write into"):
        prepare_stdlib_corpus(tmp_path / "file", vocab_size=300, max_bytes=20_000)


def test_it_trains_and_has_a_baseline(cache: Path) -> None:
    corpus = again(cache, [])
    spec = DataSpec(
        seq_length=32,
        vocab_size=corpus.vocab_size,
        train_samples=20,
        valid_samples=4,
        data_path=(corpus.prefix,),
        split="9,1",
    )
    splits = open_data(spec)
    assert splits.train.batch(0, 4).tokens_BS.shape == (4, 32) and splits.valid is not None
    loss = corpus.unigram_loss("9,1")
    assert 3 < loss < math.log(corpus.vocab_size)  # better than uniform, far from a trained model


def test_unigram_loss_is_the_mean_of_log_probabilities() -> None:
    train, valid = np.array([0, 0, 1, 3], np.uint16), np.array([[0, 1], [2, 2]])
    p = {0: 3 / 9, 1: 2 / 9, 2: 1 / 9}  # counts 2 1 0 1 0, each plus one
    want = -sum(math.log(p[token]) for token in (0, 1, 2, 2)) / 4
    assert unigram_loss(train, valid, 5) == pytest.approx(want, rel=1e-12)


def test_the_benchmark_case_reports_what_it_built() -> None:
    result = data_index_case(num_tokens=200_000, seq_length=64)
    assert result["one_epoch"]["samples"] == (result["num_tokens"] - 1) // 64
    assert result["three_epochs"]["tokens_per_s"] > 0 and result["blend"]["samples"] == 2000
