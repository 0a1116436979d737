"""`.bin/.idx` pairs: bytes as Megatron-LM's, random access, damage found when the pair is opened."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data.indexed import IndexedDataset, concat_ranges
from redline.data.layout import (
    DTYPES,
    HEADER,
    Index,
    as_prefix,
    bin_path,
    idx_path,
    read_index,
    token_dtype,
)
from redline.data.writer import IndexedWriter
from redline.errors import DataError

GOLDEN_LENGTHS = [5, 3, 9, 4, 7, 2]
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def write_pair(prefix: Path, documents: list[np.ndarray], dtype: str = "u2") -> IndexedDataset:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def golden_documents() -> list[np.ndarray]:
    return np.split(np.arange(30), np.cumsum(GOLDEN_LENGTHS)[:-1])


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_golden_bytes(tmp_path: Path) -> None:
    write_pair(tmp_path / "a.b", golden_documents())  # a dot in the prefix is part of the name
    index, tokens = tmp_path / "a.b.idx", tmp_path / "a.b.bin"
    assert (index.stat().st_size, md5(index)) == (162, "2cde453e49739c70f32461ab7be2d625")
    assert (tokens.stat().st_size, md5(tokens)) == (60, "afac4a594f37a3a654ad28674205e9c7")
    assert index.read_bytes()[:34].hex() == (
        "4d4d494449445800000100000000000000080600000000000000" + "0700000000000000"
    )


def test_add_documents_writes_the_same_bytes_as_one_by_one(tmp_path: Path) -> None:
    write_pair(tmp_path / "one", golden_documents())
    with IndexedWriter(tmp_path / "many", np.dtype("u2")) as writer:
        writer.add_documents(np.arange(17), np.array(GOLDEN_LENGTHS[:3]))
        writer.add_documents(np.arange(17, 30), np.array(GOLDEN_LENGTHS[3:]))
    for suffix in ("bin", "idx"):
        assert md5(tmp_path / f"one.{suffix}") == md5(tmp_path / f"many.{suffix}")


@pytest.mark.parametrize("mmap", [True, False])
@QUICK
@given(
    code=st.sampled_from(sorted(DTYPES)),
    lengths=st.lists(st.integers(0, 9), max_size=8),
    data=st.data(),
)
def test_round_trip(mmap: bool, code: int, lengths: list[int], data: st.DataObject) -> None:
    dtype = DTYPES[code]
    documents = [np.arange(n).astype(dtype) + dtype.type(i) for i, n in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder) / "x", documents, dtype.str)
        pair = IndexedDataset(Path(folder) / "x", mmap=mmap)
        assert pair.dtype == dtype and pair.num_documents == len(pair) == len(lengths)
        assert pair.num_tokens == sum(lengths)
        for got, want in zip(pair, documents, strict=True):
            np.testing.assert_array_equal(got, want)
        if not lengths:
            return
        chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=5))
        offsets = [data.draw(st.integers(0, lengths[i])) for i in chosen]
        counts = [
            data.draw(st.integers(0, lengths[i] - offset)) for i, offset in zip(chosen, offsets, strict=True)
        ]
        pieces = list(zip(chosen, offsets, counts, strict=True))
        want = np.concatenate([np.empty(0, dtype), *(documents[i][o : o + n] for i, o, n in pieces)])
        arrays = [np.array(column, dtype=np.int64) for column in (chosen, offsets, counts)]
        got = pair.gather(*arrays)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)
        for i, o, n in pieces:
            np.testing.assert_array_equal(pair.get(i, o, n), documents[i][o : o + n])


def test_a_mapped_sequence_is_a_view_of_the_file(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "x", golden_documents())
    assert pair[2].base is not None and not pair[2].flags.writeable
    assert pair[-1].tolist() == [28, 29]
    with pytest.raises(IndexError):
        pair[6]
    with pytest.raises(IndexError):
        pair.get(0, 3, 3)


def test_several_sequences_form_one_document(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype("i4")) as writer:
        writer.add_document([1, 2], [3])
        writer.add_document([4])
    pair = IndexedDataset(tmp_path / "x.idx")  # either file names the pair
    assert (pair.num_documents, pair.num_sequences) == (2, 3)
    assert pair.index.boundaries.tolist() == [0, 2, 3]


def test_modes_of_multimodal_files_are_kept(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "x", golden_documents())
    modes = np.array([0, 1, 0, 1, 1, 0], np.int8)
    kept = pair.index
    with open(tmp_path / "x.idx.new", "wb") as handle:
        Index(kept.dtype, kept.lengths, kept.pointers, kept.boundaries, modes).write(handle)
    os.replace(tmp_path / "x.idx.new", tmp_path / "x.idx")
    reopened = IndexedDataset(tmp_path / "x")
    assert reopened.index.modes is not None and reopened.index.modes.tolist() == modes.tolist()
    np.testing.assert_array_equal(reopened[3], pair[3])


def test_pointers_are_64_bits_wide_b091(tmp_path: Path) -> None:
    """B091: lengths that add up to more than 4 GiB, without writing the payload."""
    lengths = np.full(5, 2**29, np.int32)  # 5 x 1 GiB of uint16
    index = Index.contiguous(np.dtype("u2"), lengths, np.arange(6))
    with open(tmp_path / "big.idx", "wb") as handle:
        index.write(handle)
    assert read_index(tmp_path / "big.idx").pointers.tolist() == [i * 2**30 for i in range(5)]


def test_dtype_by_vocabulary() -> None:
    assert [token_dtype(n).name for n in (100, 65499, 65500, 128256)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def test_concat_ranges() -> None:
    assert concat_ranges(np.array([7, 3, 0]), np.array([2, 0, 3])).tolist() == [7, 8, 0, 1, 2]


def test_prefix_from_either_file() -> None:
    assert as_prefix("d/x.bin") == as_prefix("d/x.idx") == as_prefix("d/x") == Path("d/x")
    assert as_prefix("d/v1.5") == Path("d/v1.5")
    assert (bin_path(Path("v1.5")).name, idx_path(Path("v1.5")).name) == ("v1.5.bin", "v1.5.idx")


class TestDamage:
    """Every damage is a DataError that names the file and what to do, when the pair is opened."""

    @pytest.fixture
    def prefix(self, tmp_path: Path) -> Path:
        write_pair(tmp_path / "x", golden_documents())
        return tmp_path / "x"

    @pytest.mark.parametrize("suffix", ["bin", "idx"])
    def test_missing(self, prefix: Path, suffix: str) -> None:
        prefix.with_suffix(f".{suffix}").unlink()
        with pytest.raises(
            DataError, match=rf"(?s)there is no file .*x\.{suffix}.*redline data prepare"
        ) as error:
            IndexedDataset(prefix)
        assert error.value.mend

    def test_every_truncation_of_the_index(self, prefix: Path) -> None:
        path = idx_path(prefix)
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=r"x\.idx is not a whole Megatron index"):
                IndexedDataset(prefix)

    @pytest.mark.parametrize(
        ("offset", "value", "says"),
        [(0, b"X", "begins with"), (9, b"\x02", "version is 2"), (17, b"\x09", "dtype code is 9")],
    )
    def test_header(self, prefix: Path, offset: int, value: bytes, says: str) -> None:
        content = bytearray(idx_path(prefix).read_bytes())
        content[offset : offset + 1] = value
        idx_path(prefix).write_bytes(content)
        with pytest.raises(DataError, match=says):
            IndexedDataset(prefix)

    def test_absurd_counts_do_not_allocate(self, prefix: Path) -> None:
        content = bytearray(idx_path(prefix).read_bytes())
        content[: HEADER.size] = HEADER.pack(b"MMIDIDX\0\0", 1, 8, 2**60, 7)
        idx_path(prefix).write_bytes(content)
        with pytest.raises(DataError, match="cut short"):
            IndexedDataset(prefix)

    def test_longer_index(self, prefix: Path) -> None:
        with open(idx_path(prefix), "ab") as handle:
            handle.write(b"\0" * 7)
        with pytest.raises(DataError, match="longer than its header says: 169 bytes"):
            IndexedDataset(prefix)

    @pytest.mark.parametrize("size", [0, 59, 62])
    def test_tokens_shorter_or_longer_than_the_index(self, prefix: Path, size: int) -> None:
        bin_path(prefix).write_bytes(b"\0" * size)
        with pytest.raises(DataError, match=f"holds {size} bytes, but its index describes 60 bytes"):
            IndexedDataset(prefix)

    @pytest.mark.parametrize("place", [34, 34 + 24, 34 + 72], ids=["negative length", "pointer", "boundary"])
    def test_inconsistent_index(self, prefix: Path, place: int) -> None:
        content = bytearray(idx_path(prefix).read_bytes())
        content[place : place + 4] = b"\xfb\xff\xff\xff"
        if place == 34:  # keep the sum of the lengths: -5 + 13 in place of 5 + 3
            content[place + 4 : place + 8] = (13).to_bytes(4, "little")
        idx_path(prefix).write_bytes(content)
        with pytest.raises(DataError, match=r"x\.idx is damaged"):
            IndexedDataset(prefix)

    def test_cut_short_after_opening_without_mmap(self, prefix: Path) -> None:
        pair = IndexedDataset(prefix, mmap=False)
        os.truncate(bin_path(prefix), 20)
        with pytest.raises(DataError, match="cut short since it was opened"):
            pair.get(5)


class TestWriter:
    """A pair appears whole or not at all."""

    def test_an_exception_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "x", np.dtype("u2")) as writer:
            writer.add_document([1, 2, 3])
            raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []

    def test_existing_output_is_refused_unless_asked(self, tmp_path: Path) -> None:
        write_pair(tmp_path / "x", golden_documents())
        before = md5(tmp_path / "x.bin")
        with pytest.raises(DataError, match=r"(?s)x\.bin exists already.*--overwrite"):
            IndexedWriter(tmp_path / "x", np.dtype("u2"))
        with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "x", np.dtype("u2"), overwrite=True) as w:
            w.add_document([1])
            raise RuntimeError
        assert md5(tmp_path / "x.bin") == before
        with IndexedWriter(tmp_path / "x", np.dtype("u2"), overwrite=True) as writer:
            writer.add_document([7])
        assert [d.tolist() for d in IndexedDataset(tmp_path / "x")] == [[7]]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]

    @pytest.mark.parametrize("fails_at", ["tokens", "index"])
    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str) -> None:
        """The disk fills while tokens or the index are written: an error with a mend, the old pair stays."""
        old = write_pair(tmp_path / "x", golden_documents())[2].tolist()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        writer = IndexedWriter(tmp_path / "x", np.dtype("u2"), overwrite=True)
        if fails_at == "index":
            monkeypatch.setattr(Index, "write", full)
        with pytest.raises(DataError, match=r"(?s)No space left on device.*free space"), writer:
            if fails_at == "tokens":
                writer._bin.close()
                writer._bin = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (the writer closes it)
            writer.add_document(np.arange(10))
        assert IndexedDataset(tmp_path / "x")[2].tolist() == old
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]

    def test_an_unusable_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"cannot write into .*file"):
            IndexedWriter(tmp_path / "file" / "x", np.dtype("u2"))

    def test_ids_that_do_not_fit_the_storage(self, tmp_path: Path) -> None:
        fails = pytest.raises(DataError, match="token ids 5 to 65536 do not fit uint16")
        with fails, IndexedWriter(tmp_path / "x", np.dtype("u2")) as writer:
            writer.add_document([5, 65536])
        assert list(tmp_path.iterdir()) == []

    def test_a_document_beyond_32_bit_lengths(self, tmp_path: Path) -> None:
        fails = pytest.raises(DataError, match="2147483648 tokens does not fit")
        with fails, IndexedWriter(tmp_path / "x", np.dtype("u2")) as writer:
            writer.add_documents(np.empty(0, np.uint16), np.array([2**31]))
