"""Redline's storage reader under torch.distributed.checkpoint: slices of safetensors files, and JSON.

DCP plans which saved chunks make up a wanted tensor and calls this class in the order it documents. Its own
readers unpickle `.metadata` and bytes, which can execute code; they are never reached, so reading a
checkpoint executes nothing. Files that the manifest does not name are never opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from redline.checkpoint.manifest import (
    METADATA,
    VALUES,
    FileSum,
    damaged,
    find_damage,
    read_json,
    read_manifest,
)
from redline.checkpoint.metadata import Place, metadata_from_json
from redline.errors import CheckpointError


def read_values(folder: Path) -> dict[str, Any]:
    """The non-tensor values of a checkpoint. Raises CheckpointError."""
    return _read_values(folder, read_manifest(folder))


def read_metadata(folder: Path) -> Metadata:
    """Names, shapes, dtypes and chunks of a checkpoint's tensors. Raises CheckpointError."""
    return _read_metadata(folder, read_manifest(folder))


class CheckpointReader(StorageReader):
    """Reads one checkpoint folder, only the slices that the plan asks for.

    Args:
        folder: a complete checkpoint.
        verify: compare the checksum of each file that will be read (sizes are always compared).
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder, self.verify = folder, verify
        self.values: dict[str, Any] = {}
        self._files: dict[str, FileSum] = {}
        self._places: Mapping[MetadataIndex, Place] = {}
        self._fault: CheckpointError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP calls this when a checkpoint_id is passed; Redline's readers are made for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Parse the JSON files.

        DCP takes an exception here for a sign of another kind of checkpoint and goes on, so a fault is kept
        and raised by `prepare_local_plan`, from where DCP brings it to all ranks.
        """
        try:
            self._files = read_manifest(self.folder)
            self.values = _read_values(self.folder, self._files)
            metadata = _read_metadata(self.folder, self._files)
        except CheckpointError as exc:
            self._fault = exc
            return Metadata({})
        self._places = metadata.storage_data
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to prepare before the plan is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check every file that `plan` reads, before the first tensor is written on any rank."""
        if self._fault is not None:
            raise self._fault
        by_file = self._by_file(plan)
        fault = find_damage(self.folder, self._files, by_file, checksums=self.verify)
        if fault := fault or self._find_wrong_header(by_file):
            raise damaged(self.folder, fault)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read independently of each other."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each wanted slice from the memory-mapped file into its tensor."""
        for name, items in self._by_file(plan).items():
            with safe_open(self.folder / name, framework="pt") as file:
                for item in items:
                    box = tuple(
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    key = self._places[item.storage_index].key
                    saved = file.get_slice(key)[box] if box else file.get_tensor(key)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(saved)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP must never choose this class by itself."""
        return False

    def _by_file(self, plan: LoadPlan) -> dict[str, list[ReadItem]]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self._places[item.storage_index].file, []).append(item)
        return files

    def _find_wrong_header(self, by_file: Mapping[str, list[ReadItem]]) -> str | None:
        """The first file whose own header does not hold what `metadata.json` says."""
        for name, items in by_file.items():
            try:
                with safe_open(self.folder / name, framework="pt") as file:
                    for place in {self._places[item.storage_index] for item in items}:
                        shape = file.get_slice(place.key).get_shape()
                        if tuple(shape) != place.sizes:
                            return f"{place.key} in {self.folder / name} is {shape}, not {list(place.sizes)}"
            except (SafetensorError, OSError) as exc:
                return f"{self.folder / name} cannot be read ({exc})"
        return None


def _read_values(folder: Path, files: Mapping[str, FileSum]) -> dict[str, Any]:
    values = _read_listed(folder, files, VALUES)
    if not isinstance(values, dict):
        raise damaged(folder / VALUES, "it is no JSON object")
    return values


def _read_metadata(folder: Path, files: Mapping[str, FileSum]) -> Metadata:
    document = _read_listed(folder, files, METADATA)
    try:
        return metadata_from_json(document)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise damaged(folder / METADATA, f"it does not describe tensors ({exc!r})") from exc


def _read_listed(folder: Path, files: Mapping[str, FileSum], name: str) -> Any:
    """Parse a JSON file after comparing its checksum (always: it is small)."""
    if fault := find_damage(folder, files, [name], checksums=True):
        raise damaged(folder, fault)
    return read_json(folder / name)
