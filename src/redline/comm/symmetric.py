"""PyTorch's symmetric memory: ranks read and write each other's memory over NVLink, without kernels of NCCL.

    SymmetricMemory   PyTorch's pipelined all-gather + GEMM and GEMM + reduce-scatter
    SymmetricArea     an area of memory for pushed.py

NVLink's multicast is never used: the gathered operand is always asked for, which keeps PyTorch off its
multicast path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from redline.comm.collectives import all_reduce
from redline.comm.groups import Group
from redline.comm.linked_gemm import Bulk
from redline.errors import first_line
from redline.formulas.tp_traffic import TURNS


@dataclass(frozen=True, slots=True)
class SymmetricMemory(Bulk):
    """`torch.ops.symm_mem`'s pipelined all-gather + GEMM and GEMM + reduce-scatter."""

    name: str = "symmetric"

    def gather_gemm(self, x_shard: Tensor, w: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        group.sends("all-gather with GEMM")
        x, products = torch.ops.symm_mem.fused_all_gather_matmul(x_shard, [w], 0, _name(group), return_A=True)
        return products[0], x

    def gemm_scatter(self, x: Tensor, w: Tensor, group: Group) -> Tensor:
        group.sends("reduce-scatter with GEMM")
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, _name(group))
        return y


class SymmetricArea:
    """Memory of every rank of a group, mapped into each of them; see pushed.PeerMemory.

    A collective call: every rank of the group makes one, of the same size.
    """

    def __init__(self, group: Group, num_bytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        device = torch.device("cuda", torch.cuda.current_device())
        area = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._handle: Any = rendezvous(area, _name(group))
        self._area = area  # held: freed, it would be gone for the others too
        self._stream = torch.cuda.Stream(priority=-1)
        # Made once: what is begun and not ended is less than TURNS operations, and each waits for its own.
        self._ready, self._marks = torch.cuda.Event(), cycle([torch.cuda.Event() for _ in range(TURNS)])
        self._views: dict[tuple[object, ...], Tensor] = {}  # a few; making one costs the host 10 us

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See PeerMemory."""
        key = (rank, start, shape, dtype)
        if key not in self._views:
            self._views[key] = self._handle.get_buffer(rank, shape, dtype, start // dtype.itemsize)
        return self._views[key]

    def beside(self) -> AbstractContextManager[object]:
        """See PeerMemory."""
        self._ready.record()
        self._stream.wait_event(self._ready)
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """See PeerMemory."""
        event = next(self._marks)
        event.record(self._stream)
        return event

    def meet(self) -> None:
        """See PeerMemory."""
        self._handle.barrier(channel=0)


def reserve(group: Group, num_bytes: int) -> str | None:
    """Make the buffer of PyTorch's joined GEMMs, once and for all shapes of a run; why it cannot be, or None.

    A collective call: every rank of the group asks, and all get a reason if one of them does.
    """

    def make() -> None:
        from torch.distributed._symmetric_memory import get_symm_mem_workspace

        get_symm_mem_workspace(_name(group), min_size=num_bytes)

    return _made_by_all(group, make)


def open_area(group: Group, num_bytes: int) -> SymmetricArea | str:
    """An area of so many bytes on each rank, or why there can be none; a collective call like `reserve`."""
    made: list[SymmetricArea] = []
    reason = _made_by_all(group, lambda: made.append(SymmetricArea(group, num_bytes)))
    return made[0] if reason is None else reason


def _made_by_all(group: Group, make: Callable[[], object]) -> str | None:
    """Call `make` where this group has symmetric memory; the reason of any rank on which that fails."""
    reason = _refusal(group)
    if reason is None:
        try:
            make()
        except (ImportError, RuntimeError) as error:
            reason = f"PyTorch cannot set it up ({first_line(error)})"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = all_reduce(torch.tensor(float(reason is not None), device=device), group, "max")
    if reason is None and failed.item():
        return "another rank cannot"
    return reason


def _refusal(group: Group) -> str | None:
    if group.handle is None or dist.get_backend(group.handle) != "nccl":
        return "it needs GPUs that are linked by NVLink"
    device = torch.cuda.current_device()
    if torch.cuda.device_count() < group.size:
        return "its ranks must be on one machine"
    if not all(torch.cuda.can_device_access_peer(device, k) for k in range(group.size) if k != device):
        return "a GPU here cannot read another one's memory"
    return None


def _name(group: Group) -> Any:
    assert group.handle is not None
    return group.handle.group_name
