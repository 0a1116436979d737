"""A tensor of which this rank holds pieces, as torch.distributed.checkpoint wants to be told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunked(Tensor):
    """A whole tensor in name, held as boxes: `pieces[offset]` begins at `offset` in it.

    Saved and loaded box by box through the three methods below, which DCP looks for. Nothing can be computed
    with it.
    """

    pieces: dict[torch.Size, Tensor]

    @staticmethod
    def make(
        size: tuple[int, ...], pieces: Mapping[tuple[int, ...], Tensor], dtype: torch.dtype | None = None
    ) -> Chunked:
        """The tensor of `size` whose boxes on this rank are `pieces`, of `dtype` if there are none."""
        dtype = dtype or next(iter(pieces.values())).dtype
        self: Chunked = torch.Tensor._make_wrapper_subclass(Chunked, size, dtype=dtype)
        self.pieces = {torch.Size(offset): piece for offset, piece in pieces.items()}
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} was called on a tensor that is in pieces")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for offset, chunk in zip(self.pieces, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, piece.shape) for offset, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.pieces[index.offset]
