"""`metadata.json`: DCP's Metadata (sizes, dtypes, chunks with offsets) as JSON instead of a pickle.

    {"tensors": {"layers.0.mlp.up.weight": {
        "dtype": "float32", "shape": [256, 64],
        "chunks": [{"offsets": [0, 0], "sizes": [256, 64], "file": "rank_00000_0.safetensors",
                    "key": "layers.0.mlp.up.weight"}]}}}

A tensor stored whole has its own name as key in the safetensors file; a chunk has its offsets appended
("name@128,0"), since one file may hold several chunks of one tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
        torch.uint64, torch.bool,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies: a safetensors file of the checkpoint, the key in it and the shape found there."""

    file: str
    key: str
    sizes: tuple[int, ...]


def chunk_key(item: WriteItem) -> str:
    """The key of a write item inside its safetensors file."""
    assert item.tensor_data is not None and "@" not in item.index.fqn, item.index
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"


def metadata_to_json(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> bytes:
    """The content of `metadata.json`, a line for each tensor, its chunks with their places."""
    lines = []
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata), name
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            box = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
            chunks.append({**box, "file": place.file, "key": place.key})
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        entry = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return ('{"tensors": {\n' + ",\n".join(lines) + "\n}}\n").encode()


def metadata_from_json(document: Any) -> Metadata:
    """The inverse of `metadata_to_json`; `storage_data` maps each chunk's MetadataIndex to its Place.

    Raises: KeyError, TypeError or ValueError when `document` is not what `metadata_to_json` makes, or a
        tensor's chunks do not cover it.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, entry in document["tensors"].items():
        size, chunks = torch.Size(entry["shape"]), []
        for stored in entry["chunks"]:
            chunk = ChunkStorageMetadata(torch.Size(stored["offsets"]), torch.Size(stored["sizes"]))
            chunks.append(chunk)
            place = Place(str(stored["file"]), str(stored["key"]), tuple(chunk.sizes))
            places[MetadataIndex(name, chunk.offsets)] = place
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry["dtype"]]), size, chunks)
        if fault := find_gap(tensors[name]):
            raise ValueError(f"{name}: {fault}")
    return Metadata(dict(tensors), storage_data=places)


def find_gap(tensor: TensorStorageMetadata) -> str | None:
    """Why the chunks of a tensor do not add up to it, or None. (That none overlap is checked on saving.)"""
    for chunk in tensor.chunks:
        if len(chunk.sizes) != len(tensor.size) or any(
            offset < 0 or length < 0 or offset + length > extent
            for offset, length, extent in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        ):
            return f"chunk {list(chunk.sizes)} at {list(chunk.offsets)} lies outside {list(tensor.size)}"
    stored, whole = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
    return None if stored == whole else f"chunks hold {stored} of {whole} elements"
