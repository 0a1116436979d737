"""GEMMs joined to collectives by PyTorch's symmetric memory: ranks read each other's memory over NVLink.

No kernel of NCCL runs: copies go over NVLink by the copy engines while other pieces are multiplied. NVLink's
multicast is never used: the gathered operand is always asked for, which keeps PyTorch off its multicast path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from redline.comm.collectives import all_reduce
from redline.comm.groups import Group


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """`torch.ops.symm_mem`'s pipelined all-gather + GEMM and GEMM + reduce-scatter."""

    name: str = "symmetric"

    def gather_gemm(self, x_shard: Tensor, w: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        x, products = torch.ops.symm_mem.fused_all_gather_matmul(x_shard, [w], 0, _name(group), return_A=True)
        return products[0], x

    def gemm_scatter(self, x: Tensor, w: Tensor, group: Group) -> Tensor:
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, _name(group))
        return y


def reserve(group: Group, num_bytes: int) -> str | None:
    """Make the group's symmetric buffer, once and for all shapes of a run; why it cannot be, or None.

    A collective call: every rank of the group asks, and all get a reason if one of them does.
    """
    reason = _try_to_reserve(group, num_bytes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = all_reduce(torch.tensor(float(reason is not None), device=device), group, "max")
    if reason is None and failed.item():
        return "another rank cannot"
    return reason


def _try_to_reserve(group: Group, num_bytes: int) -> str | None:
    if group.handle is None or dist.get_backend(group.handle) != "nccl":
        return "it needs GPUs that are linked by NVLink"
    device = torch.cuda.current_device()
    if torch.cuda.device_count() < group.size:
        return "its ranks must be on one machine"
    if not all(torch.cuda.can_device_access_peer(device, k) for k in range(group.size) if k != device):
        return "a GPU here cannot read another one's memory"
    try:
        from torch.distributed._symmetric_memory import get_symm_mem_workspace

        get_symm_mem_workspace(_name(group), min_size=num_bytes)
    except (ImportError, RuntimeError) as error:
        return f"PyTorch cannot set it up ({str(error).splitlines()[0]})"
    return None


def _name(group: Group) -> Any:
    assert group.handle is not None
    return group.handle.group_name
