"""Loading: names, shapes, dtypes and checksums are checked on all ranks before any tensor is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from redline.checkpoint.dcp import one_process_is_fine, plain_errors
from redline.checkpoint.reader import CheckpointReader
from redline.errors import CheckpointError

# Conversions that keep every value, NaN included.
_EXACT: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float8_e4m3fn: (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.float8_e5m2: (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.int32: (torch.int64,),
}
_NAMES_SHOWN = 5


@dataclass(slots=True)
class _Request:
    """What one rank wants and what of it the checkpoint does not offer; travels with its plan."""

    names: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)


class _StrictLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, with a request that must match the checkpoint exactly.

    Each rank looks at its own tensors; the coordinator sees all requests, so that a tensor counts as
    unexpected only if no rank asks for it, and raises one error for all.
    """

    def __init__(self, folder: Path, leave: Sequence[str], allow_rounding: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.folder, self.leave, self.allow_rounding = folder, leave, allow_rounding

    def create_local_plan(self) -> LoadPlan:
        """DCP's read items, or none and the reasons."""
        request = _Request(names=list(self.state_dict))
        for name, tensor in self.state_dict.items():
            self._compare(name, tensor, request)
        fits = not (request.missing or request.shapes or request.dtypes)
        items = super().create_local_plan().items if fits else []
        return LoadPlan(items, planner_data=request)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise CheckpointError unless all requests fit and nothing saved is left over."""
        requests: list[_Request] = [plan.planner_data for plan in global_plan]
        wanted = {name for request in requests for name in request.names}
        assert self.metadata is not None
        unexpected = [
            name
            for name in self.metadata.state_dict_metadata
            if name not in wanted and not any(fnmatchcase(name, pattern) for pattern in self.leave)
        ]
        faults = {
            "the checkpoint lacks": _merge(request.missing for request in requests),
            "this run has no place for": unexpected,
            "shapes differ": _merge(request.shapes for request in requests),
            "dtypes differ": _merge(request.dtypes for request in requests),
        }
        if any(faults.values()):
            raise CheckpointError(
                f"{self.folder} does not fit this run; nothing was loaded.",
                why="; ".join(f"{what}: {_first(names)}" for what, names in faults.items() if names) + ".",
                mend="load it with the model and optimizer options it was saved with.",
            )
        return global_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Never called: there are no bytes items. DCP's own version unpickles."""
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def _compare(self, name: str, tensor: Tensor, request: _Request) -> None:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            request.missing.append(name)
            return
        if saved.size != tensor.size():
            request.shapes.append(f"{name} ({list(saved.size)} saved, {list(tensor.size())} wanted)")
        old, new = saved.properties.dtype, tensor.dtype
        rounds = self.allow_rounding and old.is_floating_point and new.is_floating_point
        if old != new and new not in _EXACT.get(old, ()) and not rounds:
            request.dtypes.append(f"{name} ({old} saved, {new} wanted)")


def load_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    leave: Sequence[str] = (),
    allow_rounding: bool = False,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint and return its values.

    The tensors may be views of larger buffers, on any device, sharded in any way: the layout they were saved
    in does not matter. Either all of them are filled or, after an error, none was touched.

    Args:
        folder: a complete checkpoint (`find_latest`).
        tensors: by the names they were saved under. With several ranks, each passes what it holds.
        leave: patterns ("optimizer.*") of saved tensors that may stay unread; any other one is an error.
        allow_rounding: let a float tensor be filled from one of a wider dtype. Exact conversions (bf16 to
            fp32) are always done, all others never.
        verify: compare the checksums of the files to be read.
        group: the ranks that load together; None for a single process.

    Raises: CheckpointError that names the file, or the first of the missing, unexpected or unlike tensors.
    """
    assert not any(tensor.is_meta for tensor in tensors.values()), "a meta tensor cannot be filled in place"
    reader = CheckpointReader(folder, verify=verify)
    with one_process_is_fine(), plain_errors():
        load(
            dict(tensors),
            storage_reader=reader,
            planner=_StrictLoadPlanner(folder, leave, allow_rounding),
            process_group=group,
            no_dist=group is None,
        )
    return reader.values


def _merge(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _first(names: list[str]) -> str:
    """'a, b, c, d, e and 12 more'."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
