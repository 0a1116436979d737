"""The layout that tensors were saved in does not bind the layout they are loaded into."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from redline.checkpoint import AsyncWriter, load_checkpoint, read_metadata, save_checkpoint, writer
from redline.errors import CheckpointError

Box = tuple[tuple[int, int], ...]  # (offset, length) by dimension


class Chunked(torch.Tensor):
    """A tensor held as boxes: states its write items and chunks to DCP by hand, as a flat shard does."""

    boxes: dict[torch.Size, torch.Tensor]

    @staticmethod
    def make(shape: torch.Size, dtype: torch.dtype, boxes: list[Box]) -> Chunked:
        self = torch.Tensor._make_wrapper_subclass(Chunked, shape, dtype=dtype)
        self.boxes = {
            torch.Size(offset for offset, _ in box): torch.full([n for _, n in box], -1, dtype=dtype)
            for box in boxes
        }
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on the whole tensor")

    def fill(self, whole: torch.Tensor) -> Chunked:
        for offsets, chunk in self.boxes.items():
            chunk.copy_(self.part(whole, offsets))
        return self

    def part(self, whole: torch.Tensor, offsets: torch.Size) -> torch.Tensor:
        lengths = self.boxes[offsets].shape
        return whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, chunk.shape), properties, self.size()
                ),
            )
            for offsets, chunk in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, chunk.shape) for offsets, chunk in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.boxes[index.offset]


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid of boxes, cut at random places of each dimension."""
    cuts = [
        sorted({0, size, *draw(st.lists(st.integers(1, max(size - 1, 1)), max_size=2))}) for size in shape
    ]
    spans = [[(a, b - a) for a, b in itertools.pairwise(line)] for line in cuts]
    return list(itertools.product(*spans))


def flat_range(columns: int, start: int, stop: int) -> list[Box]:
    """Elements start..stop of a row-major matrix as boxes: rest of a row, whole rows, begin of a row."""
    boxes: list[Box] = []
    while start < stop:
        row, column = divmod(start, columns)
        if column == 0 and stop - start >= columns:
            rows = (stop - start) // columns
            boxes.append(((row, rows), (0, columns)))
            start += rows * columns
        else:
            end = min(stop, (row + 1) * columns)
            boxes.append(((row, 1), (column, end - start)))
            start = end
    return boxes


@settings(max_examples=25, derandomize=True, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
def test_b106_chunks_of_any_grid_load_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    root = tmp_path_factory.mktemp("root")
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    saved = Chunked.make(whole.shape, whole.dtype, data.draw(tilings(shape))).fill(whole)
    with pytest.MonkeyPatch.context() as patch:  # about two chunks a file
        chunk_bytes = max(chunk.nbytes for chunk in saved.boxes.values())
        patch.setattr(writer, "FILE_BYTES", 2 * chunk_bytes)
        save_checkpoint(root, 1, {"w": saved, "whole": whole}, {})
    assert len(read_metadata(root / "iter_0000001").state_dict_metadata["w"].chunks) == len(saved.boxes)
    plain = torch.full(shape, -1.0)
    parts = Chunked.make(whole.shape, whole.dtype, data.draw(tilings(shape)))
    load_checkpoint(root / "iter_0000001", {"w": plain, "whole": parts})
    assert torch.equal(plain, whole)
    assert all(torch.equal(chunk, parts.part(whole, offsets)) for offsets, chunk in parts.boxes.items())


def test_b106_flat_ranges_of_a_matrix(tmp_path: Path) -> None:
    """Shards that cut rows, two ways: at most three boxes a range, loaded back at other boundaries."""
    whole = torch.arange(35.0).view(5, 7)
    assert [len(flat_range(7, a, b)) for a, b in ((0, 35), (3, 25), (8, 12))] == [1, 3, 1]

    def ranges(*bounds: int) -> list[Box]:
        return [box for a, b in itertools.pairwise(bounds) for box in flat_range(7, a, b)]

    saved = Chunked.make(whole.shape, whole.dtype, ranges(0, 12, 24, 35)).fill(whole)
    save_checkpoint(tmp_path, 1, {"w": saved}, {})
    other = Chunked.make(whole.shape, whole.dtype, ranges(0, 17, 34, 35))
    load_checkpoint(tmp_path / "iter_0000001", {"w": other})
    assert all(torch.equal(chunk, other.part(whole, offsets)) for offsets, chunk in other.boxes.items())


def test_chunks_with_a_hole_are_never_committed(tmp_path: Path) -> None:
    torn = Chunked.make(torch.Size([4, 4]), torch.float32, [((0, 2), (0, 4)), ((3, 1), (0, 4))])
    with pytest.raises(AssertionError, match="12 of 16"):
        save_checkpoint(tmp_path, 1, {"w": torn}, {})
    assert not list(tmp_path.iterdir())


def test_b103_b106_two_ranks_and_one(tmp_path: Path, on_ranks: Any) -> None:
    """Saved by 2 ranks, loaded by 1; saved by 1, loaded by 2, whose replicas are then bitwise equal."""
    generator = torch.Generator().manual_seed(1)
    expected = {
        name: torch.randn(5, 6, generator=generator) for name in ("rows", "columns", "replica", "plain")
    }

    def layouts(rank: int, fill: bool) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        placements = {"rows": Shard(0), "columns": Shard(1), "replica": Replicate()}
        tensors: dict[str, torch.Tensor] = {
            name: distribute_tensor(expected[name] if fill else torch.zeros(5, 6), mesh, [placement])
            for name, placement in placements.items()
        }
        return {**tensors, "plain": expected["plain"].clone() if fill else torch.zeros(5, 6)}

    def save(rank: int, group: dist.ProcessGroup) -> None:
        with AsyncWriter(group) as thread:
            tensors = layouts(rank, True)
            save_checkpoint(tmp_path / "two", 1, tensors, {"world": 2}, writer=thread)
            for tensor in tensors.values():  # training goes on while the thread writes
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()

    def load(rank: int, group: dist.ProcessGroup) -> None:
        tensors = layouts(rank, False)
        assert load_checkpoint(tmp_path / "one" / "iter_0000001", tensors, group=group) == {"world": 1}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, expected[name]), name

    on_ranks(2, save)
    files = sorted(path.name for path in (tmp_path / "two/iter_0000001").glob("*.safetensors"))
    assert files == ["rank_00000_0.safetensors", "rank_00001_0.safetensors"]
    loaded = {name: torch.zeros(5, 6) for name in expected}
    assert load_checkpoint(tmp_path / "two/iter_0000001", loaded) == {"world": 2}
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    save_checkpoint(tmp_path / "one", 1, expected, {"world": 1})
    on_ranks(2, load)


def test_all_ranks_raise_when_one_cannot_load(tmp_path: Path, on_ranks: Any) -> None:
    save_checkpoint(tmp_path, 1, {"a": torch.ones(2), "b": torch.ones(2)}, {})

    def load(rank: int, group: dist.ProcessGroup) -> None:
        tensors = {"ab"[rank]: torch.zeros(2 + rank)}  # each rank holds one; that of rank 1 is too long
        with pytest.raises(CheckpointError, match=r"b \(\[2\] saved, \[3\] wanted\)"):
            load_checkpoint(tmp_path / "iter_0000001", tensors, group=group)
        assert not next(iter(tensors.values())).any(), "a tensor was touched"

    on_ranks(2, load)
