"""From paths to microbatches: splits, blends, caches, masks, resume."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data import cache
from redline.data.microbatch import BatchFormat
from redline.data.open import DataSplits, open_data
from redline.data.samples import MockStore
from redline.data.source import Source
from redline.data.spec import DataSpec
from redline.data.writer import IndexedWriter
from redline.errors import ConfigError, DataError


def write(prefix: Path, lengths: list[int], first: int = 0, dtype: str = "u2") -> str:
    """Documents of these lengths, their tokens counting up from `first`."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        tokens = np.arange(first, first + sum(lengths))
        writer.add_documents(tokens, np.array(lengths))
    return str(prefix)


def spec_of(*words: str, **changes: Any) -> DataSpec:
    base = {"seq_length": 4, "vocab_size": 1000, "train_samples": 5, "split": "1", "data_path": words}
    return DataSpec(**(base | changes))


def tokens_of(source: Source | None, start: int = 0, count: int | None = None) -> list[list[int]]:
    assert source is not None
    rows: list[list[int]] = source.batch(
        start, len(source) - start if count is None else count
    ).tokens_BS.tolist()
    return rows


@pytest.fixture
def golden(tmp_path: Path) -> str:
    return write(tmp_path / "golden", [5, 3, 9, 4, 7, 2])


def assert_same(one: Any, two: Any) -> None:
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(two, field.name)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), field.name


class TestSingleFile:
    def test_golden_first_sample(self, golden: str) -> None:
        batch = open_data(spec_of(golden)).train.batch(0, 1)
        assert batch.tokens_BS.tolist() == [[22, 23, 24, 25]]
        assert batch.labels_BS.tolist() == [[23, 24, 25, 26]]
        assert batch.loss_mask_BS.tolist() == [[1.0] * 4]
        assert batch.positions_BS.tolist() == [[0, 1, 2, 3]]
        assert batch.segment_ids_BS is None
        assert batch.sample_index_B.tolist() == [0]
        dtypes = [batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.sample_index_B]
        assert all(tensor.dtype == torch.int64 for tensor in dtypes)
        assert batch.loss_mask_BS.dtype == torch.float32
        assert batch.tokens_BS.is_contiguous() and batch.labels_BS.is_contiguous()

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any),
        seq_length=st.integers(1, 12),
        wanted=st.integers(1, 25),
        mmap=st.booleans(),
    )
    def test_samples_are_pieces_of_the_shuffled_stream(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        lengths: list[int],
        seq_length: int,
        wanted: int,
        mmap: bool,
    ) -> None:
        prefix = write(tmp_path_factory.mktemp("d") / "x", lengths)
        spec = spec_of(prefix, seq_length=seq_length, train_samples=wanted, mmap_bin_files=mmap)
        source = open_data(spec).train
        order = source.samples.order  # type: ignore[attr-defined]
        documents = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        stream = np.concatenate([documents[d] for d in order.document_index])
        batch = source.batch(0, len(source))
        for row, cut in enumerate(order.shuffle_index.tolist()):
            piece = stream[cut * seq_length : (cut + 1) * seq_length + 1]
            assert batch.tokens_BS[row].tolist() == piece[:-1].tolist()
            assert batch.labels_BS[row].tolist() == piece[1:].tolist()

    def test_three_documents_many_epochs(self, tmp_path: Path) -> None:
        source = open_data(spec_of(write(tmp_path / "x", [1, 2, 1]), train_samples=100, seq_length=7)).train
        assert len(source) >= 100
        assert {token for row in tokens_of(source) for token in row} == {0, 1, 2, 3}

    def test_the_seed_decides_the_order(self, golden: str) -> None:
        orders = [tokens_of(open_data(spec_of(golden, seed=seed)).train) for seed in (1, 2, 1)]
        assert orders[0] == orders[2] != orders[1]

    def test_past_the_end(self, golden: str) -> None:
        with pytest.raises(DataError, match="samples 5 to 8 were asked for, but this split holds 7"):
            open_data(spec_of(golden)).train.batch(5, 3)


class TestResume:
    def test_a_number_is_all_it_takes_b098(self, golden: str) -> None:
        """B098: accumulation 4, resume at step 5: the next microbatches are number 20 to 23."""
        spec = spec_of(golden, train_samples=30)
        source, reopened = open_data(spec).train, open_data(spec).train
        uncut = [source.batch(k, 1) for k in range(24)]
        consumed = 5 * 4
        for k in range(4):
            assert_same(reopened.batch(consumed + k, 1), uncut[20 + k])

    @pytest.mark.parametrize("cyclic", [False, True])
    def test_micro_batch_size_changes_nothing_b113(self, golden: str, cyclic: bool) -> None:
        """B113, the data's part: rows, masks and sample numbers are those of micro-batch size 1."""
        kind = "cyclic" if cyclic else "single"
        spec = spec_of(
            golden, train_samples=12, eod_id=9, eod_mask_loss=True, reset_attention_mask=True, pad_id=17
        )
        source = open_data(dataclasses.replace(spec, dataloader_type=kind)).train
        singles = [source.batch(k, 1) for k in range(12)]
        for size in (2, 4, 12):
            for start in range(0, 12, size):
                batch = source.batch(start, size)
                for field in dataclasses.fields(batch):
                    if field.name == "documents":  # of packed samples
                        continue
                    parts = [getattr(single, field.name) for single in singles[start : start + size]]
                    assert torch.equal(getattr(batch, field.name), torch.cat(parts)), field.name

    def test_cyclic_epochs_are_permutations_by_torch(self, golden: str) -> None:
        plain = open_data(spec_of(golden)).train
        cyclic = open_data(spec_of(golden, dataloader_type="cyclic")).train
        assert len(cyclic) == 7
        rows = tokens_of(plain)
        for epoch in range(3):
            order = torch.randperm(7, generator=torch.Generator().manual_seed(epoch)).tolist()
            batch = cyclic.batch(7 * epoch, 7)
            assert batch.tokens_BS.tolist() == [rows[k] for k in order]
            assert batch.sample_index_B.tolist() == list(range(7 * epoch, 7 * epoch + 7))
        assert tokens_of(cyclic, 5, 4) == tokens_of(cyclic, 0, 14)[5:9]  # across an epoch's end

    def test_an_empty_microbatch_keeps_its_width(self, golden: str) -> None:
        assert open_data(spec_of(golden)).train.batch(3, 0).tokens_BS.shape == (0, 4)


def reference_masks(tokens: list[int], eod: int, reset_position: bool) -> tuple[list[int], list[list[bool]]]:
    """Megatron-LM's loop over end-of-document places: positions, and which pairs may attend."""
    size = len(tokens)
    positions = list(range(size))
    allowed = [[j <= i for j in range(size)] for i in range(size)]
    previous = 0
    for place in [i for i, token in enumerate(tokens) if token == eod]:
        for i in range(place + 1, size):
            for j in range(place + 1):
                allowed[i][j] = False
            if reset_position:
                positions[i] -= place + 1 - previous
        previous = place + 1
    return positions, allowed


class TestFormat:
    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(
        rows=st.integers(1, 12).flatmap(
            lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n + 1, max_size=n + 1), max_size=3)
        ),
        reset_position=st.booleans(),
    )
    def test_equals_the_loop_over_ends_of_documents(
        self, rows: list[list[int]], reset_position: bool
    ) -> None:
        if not rows:
            return
        rules = BatchFormat(eod_id=0, reset_position_ids=reset_position, reset_attention_mask=True)
        batch = rules.microbatch(np.array(rows), np.arange(len(rows)))
        assert batch.segment_ids_BS is not None and batch.segment_ids_BS.dtype == torch.int32
        for row, text in enumerate(rows):
            positions, allowed = reference_masks(text[:-1], 0, reset_position)
            segments = batch.segment_ids_BS[row].tolist()
            assert batch.positions_BS[row].tolist() == positions
            assert [
                [j <= i and segments[i] == segments[j] for j in range(len(positions))]
                for i in range(len(positions))
            ] == allowed
        pairs = sum(length * (length + 1) // 2 for length in batch.lengths)  # what attention computes
        assert pairs == sum(i == j for s in batch.segment_ids_BS for k, i in enumerate(s) for j in s[: k + 1])

    def test_loss_mask(self) -> None:
        text = np.array([[5, 0, 7, -1, -1, 0]])
        plain = BatchFormat(eod_id=0).microbatch(text, np.arange(1))
        assert plain.loss_mask_BS.tolist() == [[1, 1, 0, 0, 1]]  # labels 0 7 -1 -1 0
        assert plain.tokens_BS.tolist() == [[5, 0, 7, 0, 0]]
        assert plain.labels_BS.tolist() == [[0, 7, 0, 0, 0]]
        masked = BatchFormat(eod_id=0, eod_mask_loss=True).microbatch(text, np.arange(1))
        assert masked.loss_mask_BS.tolist() == [[1, 0, 0, 0, 1]]

    def test_moving(self, golden: str) -> None:
        batch = open_data(spec_of(golden, eod_id=9, reset_attention_mask=True)).train.batch(0, 2)
        moved = batch.to("meta")
        assert moved.segment_ids_BS is not None and moved.segment_ids_BS.device.type == "meta"
        assert_same(batch.to("cpu"), batch)

    @pytest.mark.parametrize("switch", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
    def test_switches_need_the_token(self, golden: str, switch: str) -> None:
        flag = "--" + switch.replace("_", "-")
        with pytest.raises(ConfigError, match=f"(?s){flag}.*no end-of-document token.*--eod-token"):
            spec_of(golden, **{switch: True})


class TestVocabulary:
    @pytest.mark.parametrize("bad", [1000, 65535])
    def test_ids_beyond_the_vocabulary_are_named(self, tmp_path: Path, bad: int) -> None:
        with IndexedWriter(tmp_path / "x", np.dtype("u2")) as writer:
            writer.add_document([1, 2, 3, 4])
            writer.add_document([5, bad, 6])
        source = open_data(spec_of(str(tmp_path / "x"), train_samples=2, seq_length=2)).train
        with pytest.raises(DataError, match=rf"x\.bin, document 1: token id {bad} .*\n.*999"):
            source.batch(0, len(source))

    def test_negative_ids_but_padding(self, tmp_path: Path) -> None:
        with IndexedWriter(tmp_path / "x", np.dtype("i4")) as writer:
            writer.add_document([1, -1, 3, -2, 5, 6, 7])
        source = open_data(spec_of(str(tmp_path / "x"), train_samples=1, seq_length=2)).train
        good = [source.batch(k, 1) for k in range(2) if source.samples.order.shuffle_index[k] != 1]  # type: ignore[attr-defined]
        assert all(batch.tokens_BS.min() >= 0 for batch in good)
        with pytest.raises(DataError, match="document 0: token id -2"):
            source.batch(0, len(source))


class TestSplits:
    def test_the_three_splits_are_disjoint(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "x", [20] * 10)
        spec = spec_of(prefix, split="8,1,1", valid_samples=3, test_samples=2)
        splits = open_data(spec)
        for source, documents in ((splits.train, range(8)), (splits.valid, [8]), (splits.test, [9])):
            assert {token // 20 for row in tokens_of(source) for token in row} <= set(documents)
        assert splits.choices == ()
        assert [(part.split, part.num_documents, part.num_tokens) for part in splits.parts] == [
            ("train", 8, 160),
            ("valid", 1, 20),
            ("test", 1, 20),
        ]
        assert splits.parts[1].epochs == pytest.approx(3 * 4 / 20)

    def test_tiny_corpus_evaluates_what_it_can_b096(self, tmp_path: Path) -> None:
        """B096: 3 documents, split 98,1,1: it trains, evaluation is off, and the reason is on record."""
        prefix = write(tmp_path / "x", [6, 6, 6])
        splits = open_data(spec_of(prefix, split="98,1,1", valid_samples=4, test_samples=4))
        assert len(splits.train) >= 5 and splits.valid is None and splits.test is None
        assert [(c.what, c.ran) for c in splits.choices] == [("valid split", "off"), ("test split", "off")]
        assert "3 documents" in splits.choices[0].why and "valid split" in splits.choices[0].why

    def test_an_empty_training_split_is_an_error(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "x", [6, 6, 6])
        with pytest.raises(DataError, match=r"(?s)--split 1,98,1: the train split is empty.*3 documents"):
            open_data(spec_of(prefix, split="1,98,1"))

    def test_an_empty_corpus_is_an_error(self, tmp_path: Path) -> None:
        for name, lengths in (("none", []), ("zero", [0, 0])):
            with pytest.raises(DataError, match="train split is empty"):
                open_data(spec_of(write(tmp_path / name, lengths)))

    def test_a_file_for_each_split(self, tmp_path: Path) -> None:
        train = write(tmp_path / "a", [30], first=0)
        valid = write(tmp_path / "b", [30], first=100)
        spec = spec_of(train_data_path=(train,), valid_data_path=(valid,), valid_samples=4, test_samples=4)
        splits = open_data(spec)
        assert max(map(max, tokens_of(splits.train))) < 30
        assert min(map(min, tokens_of(splits.valid))) >= 100
        assert splits.test is None and "no --test-data-path" in splits.choices[0].why

    def test_nothing_wanted_opens_nothing(self, golden: str) -> None:
        splits = open_data(spec_of(golden, split="1,1,1"))
        assert splits.valid is None and splits.test is None and splits.choices == ()


class TestBlends:
    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[str, str]:
        return write(tmp_path / "a", [41] * 10, first=0), write(tmp_path / "b", [41] * 10, first=500)

    @staticmethod
    def shares(splits: DataSplits, count: int) -> list[int]:
        rows = splits.train.batch(0, count).tokens_BS
        return [int((rows[:, 0] < 500).sum()), int((rows[:, 0] >= 500).sum())]

    def test_weights_0_001_and_0_999_b095(self, pair: tuple[str, str]) -> None:
        """B095: two sets of about 100 samples, 10k draws, wrapping by epochs."""
        splits = open_data(spec_of("0.001", pair[0], "0.999", pair[1], train_samples=10_000))
        few, many = self.shares(splits, 10_000)
        assert abs(few - 10) <= 1 and few + many == 10_000

    def test_weight_0_is_left_out_b095(self, pair: tuple[str, str]) -> None:
        splits = open_data(spec_of("0", pair[0], "1", pair[1], train_samples=10_000))
        assert self.shares(splits, 10_000) == [0, 10_000]
        assert splits.choices[0].ran == "left out" and "weight is 0" in splits.choices[0].why

    def test_weights_need_not_add_up_to_1(self, pair: tuple[str, str]) -> None:
        splits = open_data(spec_of("3", pair[0], "1", pair[1], train_samples=40))
        assert self.shares(splits, 40) == [30, 10]
        assert [part.weight for part in splits.parts] == [0.75, 0.25]
        assert splits.parts[0].epochs == pytest.approx(30 * 4 / 410)

    def test_without_weights_each_set_is_seen_once(self, tmp_path: Path) -> None:
        one, two = write(tmp_path / "a", [41]), write(tmp_path / "b", [121], first=500)
        splits = open_data(spec_of(one, two, train_samples=40))  # 10 and 30 samples of 4 tokens
        assert self.shares(splits, 40) == [10, 30]
        starts = sorted(row[0] for row in tokens_of(splits.train))
        assert starts == [*range(0, 40, 4), *range(500, 620, 4)]

    def test_without_weights_more_than_one_epoch(self, tmp_path: Path) -> None:
        one, two = write(tmp_path / "a", [50]), write(tmp_path / "b", [150], first=500)
        splits = open_data(spec_of(one, two, train_samples=400))
        assert len(splits.train) == 400 and self.shares(splits, 400) == [100, 300]

    def test_a_set_without_documents_in_a_split_is_left_out(self, tmp_path: Path) -> None:
        tiny, big = write(tmp_path / "a", [9]), write(tmp_path / "b", [9] * 20, first=500)
        spec = spec_of("0.5", tiny, "0.5", big, split="9,1", valid_samples=6)
        splits = open_data(spec)
        assert min(map(min, tokens_of(splits.valid))) >= 500
        assert [(c.what.split()[0], c.ran) for c in splits.choices] == [("valid", "left out")]

    def test_without_weights_a_set_shorter_than_a_sample_is_left_out(self, tmp_path: Path) -> None:
        one, two = write(tmp_path / "a", [2]), write(tmp_path / "b", [121], first=500)
        splits = open_data(spec_of(one, two, train_samples=30))
        assert self.shares(splits, 30) == [0, 30]
        assert "shorter than one sample" in splits.choices[0].why

    def test_sets_too_short_for_one_sample_still_count(self, tmp_path: Path) -> None:
        one, two = write(tmp_path / "a", [2]), write(tmp_path / "b", [2], first=500)
        assert len(open_data(spec_of(one, two, train_samples=8)).train) == 8


class TestMock:
    def test_documents(self) -> None:
        store = MockStore(vocab_size=100, eod_id=99)
        length = int(store.lengths[7])
        row = store.gather(np.array([7]), np.array([0]), np.array([length]))
        assert row.tolist() == [(k + 1) % 100 for k in range(length - 1)] + [99]
        middle = store.gather(np.array([7, 8]), np.array([length - 1, 1]), np.array([1, 2]))
        assert middle.tolist() == [99, 2, 3]
        assert store.lengths.min() == 1 and store.lengths.max() == 4095

    def test_mock_source(self) -> None:
        spec = spec_of(mock_data=True, vocab_size=50, seq_length=64, split="969,30,1", valid_samples=2)
        splits = open_data(spec)
        batch = splits.train.batch(0, 5)
        assert int(batch.tokens_BS.max()) < 50 and batch.tokens_BS.shape == (5, 64)
        assert_same(batch, open_data(spec).train.batch(0, 5))
        assert splits.valid is not None and splits.parts[0].name == "--mock-data"

    def test_one_source_of_data_only(self, golden: str) -> None:
        with pytest.raises(ConfigError, match="--mock-data and --data-path exclude"):
            spec_of(golden, mock_data=True)
        with pytest.raises(ConfigError, match="no training data is named"):
            spec_of()


class TestOptions:
    def test_unknown_loader(self, golden: str) -> None:
        with pytest.raises(ConfigError, match="--dataloader-type external"):
            spec_of(golden, dataloader_type="external")

    @pytest.mark.parametrize("seed", [-1, 2**32])
    def test_seed_range(self, golden: str, seed: int) -> None:
        with pytest.raises(ConfigError, match=f"--seed {seed}"):
            spec_of(golden, seed=seed)

    def test_nothing_to_train_on(self, golden: str) -> None:
        with pytest.raises(ConfigError, match="--train-samples 0"):
            open_data(spec_of(golden, train_samples=0))


class TestCache:
    def spec(self, prefix: str, folder: Path, **changes: Any) -> DataSpec:
        words = ("1", prefix, "1", prefix)
        return spec_of(*words, data_cache_path=folder / "cache", train_samples=20, **changes)

    def test_second_opening_reads_the_cache(
        self, golden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = self.spec(golden, tmp_path)
        first = tokens_of(open_data(spec).train)
        assert first == tokens_of(open_data(dataclasses.replace(spec, data_cache_path=None)).train)

        def never(*_: object, **__: object) -> None:
            raise AssertionError("built again")

        monkeypatch.setattr("redline.data.open.build_sample_order", never)
        monkeypatch.setattr("redline.data.open.blend_order", never)
        assert tokens_of(open_data(spec).train) == first

    def test_the_key_is_the_content(self, golden: str, tmp_path: Path) -> None:
        spec = self.spec(golden, tmp_path)
        open_data(spec)
        count = len(list((tmp_path / "cache").iterdir()))
        for suffix in ("bin", "idx"):
            os.rename(f"{golden}.{suffix}", tmp_path / f"moved.{suffix}")
        open_data(self.spec(str(tmp_path / "moved"), tmp_path))
        assert len(list((tmp_path / "cache").iterdir())) == count
        open_data(self.spec(write(tmp_path / "other", [5, 3, 9, 4, 6, 3]), tmp_path))
        open_data(dataclasses.replace(self.spec(str(tmp_path / "moved"), tmp_path), seed=7))
        assert len(list((tmp_path / "cache").iterdir())) == count + 8  # 3 arrays and a seal, twice

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
    def test_a_damaged_cache_is_rebuilt(self, golden: str, tmp_path: Path, damage: str) -> None:
        spec = self.spec(golden, tmp_path)
        want = tokens_of(open_data(spec).train)
        for path in (tmp_path / "cache").iterdir():
            content = bytearray(path.read_bytes())
            content[-3] ^= 1
            if damage == "gone":
                path.unlink()
            else:
                path.write_bytes({"flip": content, "cut": content[:-3], "empty": b""}[damage])
            assert tokens_of(open_data(spec).train) == want
            intact = (tmp_path / "cache").joinpath(path.name).read_bytes()
            assert len(intact) == len(content)

    def test_a_cache_that_cannot_be_written(
        self, golden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(DataError, match="--data-cache-path"):
            open_data(self.spec(golden, tmp_path))
        (tmp_path / "cache").unlink()

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(cache.np, "save", full)
        with pytest.raises(DataError, match="No space left on device"):
            open_data(self.spec(golden, tmp_path))
        assert list((tmp_path / "cache").iterdir()) == []
