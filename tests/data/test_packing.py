"""Packing: every prediction once an epoch, none across documents, nearly no padding, by number alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data import DataSpec, IndexedWriter, Microbatch, open_data
from redline.data.packing import best_fit, build_packed_order, cut_pieces, pack

VOCAB = 1000


def skewed(count: int, mean: float = 700, most: int = 8192, seed: int = 0) -> np.ndarray:
    """Lengths of real documents: log-normal with a long tail."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - 0.72, 1.2, count)
    return np.clip(lengths, 2, most).astype(np.int32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 17), st.integers(1, 17))
def test_packer_places_each_piece_once_and_overfills_nothing(
    lengths: list[int], seq_length: int, most: int
) -> None:
    pieces = cut_pieces(np.array(lengths, np.int32), range(len(lengths)), seq_length)
    assert pieces.length.sum() == sum(max(length - 1, 0) for length in lengths)
    histogram = np.bincount(pieces.length, minlength=seq_length + 1)
    for packed in (best_fit(histogram, seq_length, most), pack(histogram, seq_length)):
        found = np.zeros_like(histogram)
        for bins in packed:
            assert bins.count > 0
            assert 0 < sum(length * copies for length, copies in bins.contents) <= seq_length
            for length, copies in bins.contents:
                found[length] += copies * bins.count
        assert (found == histogram).all()
    assert all(bins.documents <= most for bins in best_fit(histogram, seq_length, most))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(4, 12))
def test_packer_is_best_fit_decreasing(lengths: list[int], seq_length: int) -> None:
    """Against the textbook: piece by piece into the fullest sample with room, else a new one."""
    pieces = sorted((min(length, seq_length) for length in lengths), reverse=True)
    rooms: list[int] = []
    for piece in pieces:
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq_length) - piece)
    packed = best_fit(np.bincount(pieces, minlength=seq_length + 1), seq_length, seq_length)
    left = [
        seq_length - sum(length * copies for length, copies in bins.contents)
        for bins in packed
        for _ in range(bins.count)
    ]
    assert sorted(left) == sorted(rooms)


@pytest.mark.parametrize(("count", "seq_length"), [(20_000, 8192), (20_000, 2048), (300, 8192)])
def test_over_95_percent_of_the_places_hold_tokens(count: int, seq_length: int) -> None:
    order = build_packed_order(skewed(count), range(count), seq_length=seq_length, num_samples=None, seed=1)
    efficiency = order.length.sum() / (len(order) * seq_length)
    assert efficiency > 0.95
    assert order.max_documents <= 257, "the array of boundaries stays short"


def test_epochs_differ_each_is_complete_and_more_of_them_change_nothing() -> None:
    lengths = skewed(500)
    one, three = (
        build_packed_order(lengths, range(10, 490), seq_length=1024, num_samples=wanted, seed=3)
        for wanted in (None, 3 * 300)
    )
    per_epoch = len(one)
    assert len(three) >= 900 and len(three) % per_epoch == 0
    everything = np.arange(len(one.length))
    assert all((np.sort(epoch) == everything).all() for epoch in three.piece)
    assert (three.piece[0] == one.piece[0]).all() and (three.shuffle[0] == one.shuffle[0]).all()
    assert (three.piece[0] != three.piece[1]).any() and (three.shuffle[0] != three.shuffle[1]).any()
    other = build_packed_order(lengths, range(10, 490), seq_length=1024, num_samples=None, seed=4)
    assert (other.piece[0] != one.piece[0]).any()
    assert set(one.document.tolist()) == set(range(10, 490))


def write(prefix: Path, documents: list[list[int]]) -> Path:
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def spec(prefix: Path, **changes: object) -> DataSpec:
    options = {
        "seq_length": 16,
        "vocab_size": VOCAB,
        "train_samples": 1,
        "train_data_path": (str(prefix),),
        **changes,
    }
    return DataSpec(**options)


def predictions(batch: Microbatch) -> list[list[tuple[int, int]]]:
    """(input, label) of each document of a packed microbatch, what is masked left out."""
    documents = batch.documents
    assert documents is not None
    found = []
    starts = documents.cu_seqlens.tolist()
    tokens, labels, counts = (x[0].tolist() for x in (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS))
    for start, stop in itertools.pairwise(starts):
        assert batch.positions_BS[0, start:stop].tolist() == list(range(stop - start))
        pairs = [(tokens[i], labels[i]) for i in range(start, stop) if counts[i]]
        if pairs:
            found.append(pairs)
    return found


DOCUMENTS = [[10, 11, 12], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34, 35, 36]]
PAIRS = [list(itertools.pairwise(document)) for document in DOCUMENTS]


def test_no_label_comes_from_another_document(tmp_path: Path) -> None:
    """B070: lengths 3, 5 and 7 in 16 places. The last token of each has no target, so it takes no place."""
    data = open_data(spec(write(tmp_path / "a", DOCUMENTS), packing=True))
    batch = data.train.batch(0, 1)
    assert sorted(predictions(batch)) == PAIRS
    assert batch.num_tokens == 2 + 4 + 6 and sorted(batch.lengths) == [2, 4, 6]
    assert batch.tokens_BS.shape == (1, 16) and batch.loss_mask_BS.sum() == 12
    assert "75.0% of the places hold tokens" in next(c.why for c in data.choices if "packing" in c.what)


def test_marked_documents_keep_the_stream_and_drop_labels_across_borders(tmp_path: Path) -> None:
    """B070 for samples cut as ever: the target of each document's last token is masked."""
    prefix = write(tmp_path / "a", DOCUMENTS * 5)
    plain = open_data(spec(prefix, train_samples=4)).train.batch(0, 4)
    batch = open_data(spec(prefix, train_samples=4, mark_documents=True)).train.batch(0, 4)
    assert (batch.tokens_BS.reshape(4, 16) == plain.tokens_BS).all()
    pairs = {pair for document in predictions(batch) for pair in document}
    assert pairs <= {pair for document in PAIRS for pair in document}
    masked = batch.loss_mask_BS.reshape(4, 16) == 0
    assert set(plain.tokens_BS[masked].tolist()) <= {12, 24, 36} and masked.any()
    assert (batch.labels_BS.reshape(4, 16) == plain.labels_BS)[~masked].all()


def test_long_documents_are_cut_without_losing_a_prediction(tmp_path: Path) -> None:
    document = list(range(100, 150))
    data = open_data(spec(write(tmp_path / "a", [document, [7, 8]]), packing=True, train_samples=4))
    pairs = [
        pair for number in range(4) for pairs in predictions(data.train.batch(number, 1)) for pair in pairs
    ]
    assert sorted(pairs) == sorted([*itertools.pairwise(document), (7, 8)])


def test_sizes_never_change_and_samples_go_by_their_number(tmp_path: Path) -> None:
    """Fixed shapes whatever is packed, blends too; a microbatch is its samples side by side."""
    random = np.random.default_rng(1)
    paths: list[str] = []
    for name, mean in (("a", 5), ("b", 30)):
        documents = [random.integers(1, VOCAB, 1 + random.poisson(mean)).tolist() for _ in range(40)]
        paths += ["0.5", str(write(tmp_path / name, documents))]
    options = {"seq_length": 64, "packing": True, "train_samples": 24, "train_data_path": tuple(paths)}
    cached = {**options, "data_cache_path": tmp_path / "cache"}
    data = open_data(spec(tmp_path, **options))
    again = open_data(spec(tmp_path, **cached)), open_data(spec(tmp_path, **cached))  # built, then read
    shapes = set()
    for start in range(0, 24, 3):
        batch = data.train.batch(start, 3)
        shapes.add((tuple(batch.tokens_BS.shape), tuple(batch.documents.cu_seqlens.shape)))
        assert batch.documents.cu_seqlens[-1] == 3 * 64 and batch.documents.max_seqlen == 64
        assert batch.documents.cu_seqlens.diff().min() >= 0
        for other in again:
            assert (other.train.batch(start, 3).tokens_BS == batch.tokens_BS).all()
        for i in range(3):
            one = data.train.batch(start + i, 1)
            part = slice(64 * i, 64 * (i + 1))
            assert (one.tokens_BS == batch.tokens_BS[:, part]).all()
            assert (one.labels_BS == batch.labels_BS[:, part]).all()
    assert len(shapes) == 1
    assert batch.num_samples == 3
