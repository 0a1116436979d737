"""Redline's storage writer under torch.distributed.checkpoint: tensors as safetensors, the rest as JSON.

DCP plans which rank writes which chunk and calls this class in the order it documents. Its own file system
writer pickles the metadata and everything that is no tensor; here neither happens: the metadata becomes
`metadata.json`, other values never reach DCP (they are `values.json`), and the writer refuses them.

Every rank writes its own `rank_RRRRR_N.safetensors` files and returns their sums; the coordinator alone makes
the folder, writes the JSON files and commits, once all ranks are done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from redline.checkpoint.folders import commit, open_partial, partial_folder
from redline.checkpoint.manifest import (
    METADATA,
    VALUES,
    FileSum,
    sum_file,
    write_manifest,
    write_synced,
)
from redline.checkpoint.metadata import DTYPES, Place, chunk_key, find_gap, metadata_to_json
from redline.errors import CheckpointError
from redline.files import os_errors_as
from redline.units import GIB

FILE_BYTES = 2 * GIB  # a file is closed once another tensor would carry it over this size

Resolve = Callable[[WriteItem], Tensor]
Snapshot = Callable[[SavePlan, SavePlanner], Resolve]
Waits = Callable[[str], object]


def waits_unseen(what: str) -> None:
    """Where nobody asks what a rank waits for."""


def live_tensors(plan: SavePlan, planner: SavePlanner) -> Resolve:
    """The snapshot that copies nothing: chunks are taken from the tensors as they are while writing."""
    return lambda item: cast(Tensor, planner.resolve_data(item))


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a rank reports of one written chunk."""

    place: Place
    file_sum: FileSum


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint into `root`.

    Args:
        root, iteration: the checkpoint becomes `root/iter_<iteration>`.
        values: the content of `values.json`.
        keep, keep_every: which older checkpoints stay (see `folders.retired`).
        snapshot: called once a rank knows what it will write; returns where to take the tensors from.
        waits: called where a rank has done its part, with what it then waits for the others in.
    """

    def __init__(
        self,
        root: Path,
        iteration: int,
        values: bytes,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        snapshot: Snapshot = live_tensors,
        waits: Waits = waits_unseen,
    ) -> None:
        assert keep is None or keep >= 1, keep
        self.root, self.iteration, self.values = root, iteration, values
        self.keep, self.keep_every, self.snapshot = keep, keep_every, snapshot
        self._waits = waits
        self._partial: Path | None = None  # on the coordinator, once made

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP calls this when a checkpoint_id is passed; Redline's writers are made for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is no tensor, on every rank, before anything is written."""
        self._waits("the plan of who writes what")
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(
                    f"{item.index.fqn} is no tensor and cannot be saved among the tensors.",
                    why="DCP would pickle it, and a pickle can execute code when it is read.",
                    mend="pass it in `values`, which are stored as JSON.",
                )
            assert item.tensor_data is not None, item.index
            assert item.tensor_data.properties.dtype in DTYPES.values(), item
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the folder, and tell each rank its number (for its file names)."""
        self._partial = open_partial(self.root, self.iteration)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, each file forced onto the disk."""
        resolve = self.snapshot(plan, planner)
        folder = partial_folder(self.root, self.iteration)
        results: list[WriteResult] = []
        for number, items in enumerate(_split_into_files(plan.items, FILE_BYTES)):
            path = folder / f"rank_{plan.storage_data:05d}_{number}.safetensors"
            results += _write_chunks(path, items, resolve)
        self._waits("the end of all ranks' writing")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, all ranks having written: write the JSON files and commit."""
        partial = self._partial
        assert partial is not None
        for name, tensor in metadata.state_dict_metadata.items():
            gap = find_gap(tensor) if isinstance(tensor, TensorStorageMetadata) else "it is no tensor"
            assert gap is None, f"{name}: {gap}"
        stored = {result.index: result.storage_data for rank in results for result in rank}
        files = {chunk.place.file: chunk.file_sum for chunk in stored.values()}
        document = metadata_to_json(metadata, {index: chunk.place for index, chunk in stored.items()})
        with os_errors_as(CheckpointError, partial, "write"):
            files[METADATA] = write_synced(partial / METADATA, document)
            files[VALUES] = write_synced(partial / VALUES, self.values)
            write_manifest(partial, self.iteration, files)
            commit(partial, self.iteration, self.keep, self.keep_every)

    def abandon(self) -> None:
        """After a failure: give the disk back. Older checkpoints were not touched."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP must never choose this class by itself."""
        return False


def _split_into_files(items: list[WriteItem], file_bytes: int) -> Iterator[list[WriteItem]]:
    """Runs of `items`, in order, of at most `file_bytes` each (a larger tensor gets a file of its own)."""
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        if batch and size + _item_bytes(item) > file_bytes:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += _item_bytes(item)
    if batch:
        yield batch


def _sizes(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None, item.index
    return tuple(item.tensor_data.chunk.sizes)


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, item.index
    return prod(_sizes(item)) * item.tensor_data.properties.dtype.itemsize


def _write_chunks(path: Path, items: list[WriteItem], resolve: Resolve) -> list[WriteResult]:
    """Write one durable safetensors file. Raises CheckpointError."""
    tensors = {chunk_key(item): resolve(item).detach().cpu().contiguous() for item in items}
    with os_errors_as(CheckpointError, path, "write"):
        path.touch()
        mode = path.stat().st_mode  # the umask's; save_file renames a private temporary file over it
        try:
            save_file(_without_overlap(tensors), path, metadata={"format": "pt"})
        except SafetensorError as exc:
            raise OSError(str(exc)) from exc
        path.chmod(mode)
        file_sum = sum_file(path, sync=True)
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=_item_bytes(item),
            storage_data=_Stored(Place(path.name, chunk_key(item), _sizes(item)), file_sum),
        )
        for item in items
    ]


def _without_overlap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, copied where two share memory (tied names), which safetensors refuses to write."""
    apart, end = dict(tensors), 0
    for key, tensor in sorted(tensors.items(), key=lambda entry: entry[1].data_ptr()):
        if tensor.numel() and tensor.data_ptr() < end:
            apart[key] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return apart
