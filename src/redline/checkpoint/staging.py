"""A snapshot of tensors in host memory that a background thread can write while training goes on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from redline.checkpoint.writer import Resolve, live_tensors
from redline.errors import CheckpointError


class StagingBuffers:
    """Host copies of what this rank writes, kept and reused from save to save.

    One buffer a chunk, in pinned memory for tensors of a GPU (the copy then runs at the link's speed). Only
    chunks of this rank's plan are copied, so a tensor that all ranks hold is staged by one of them.
    (torch's pinned allocator rounds each buffer up to a power of two; formulas/host.py counts that.)
    """

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def snapshot(self, plan: SavePlan, planner: SavePlanner) -> Resolve:
        """Copy all chunks of `plan` and return where to find them.

        Raises: CheckpointError when the host has not enough memory.
        """
        buffers: dict[MetadataIndex, Tensor] = {}
        devices, live = set(), live_tensors(plan, planner)
        for item in plan.items:
            source = live(item)
            buffer = buffers[item.index] = self._buffer(item.index, source)
            buffer.copy_(source.detach(), non_blocking=source.is_cuda)
            devices.add(source.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._buffers = buffers
        return lambda item: buffers[item.index]

    def _buffer(self, index: MetadataIndex, like: Tensor) -> Tensor:
        old = self._buffers.get(index)
        if old is not None and old.shape == like.shape and old.dtype == like.dtype:
            return old
        try:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        except RuntimeError as exc:  # torch's allocators raise no MemoryError
            raise CheckpointError(
                f"no host memory left for a snapshot of {index.fqn} ({like.nbytes} bytes).",
                why="an asynchronous save copies all state to host memory first.",
                mend="add --no-async-save, which writes straight from the tensors.",
            ) from exc
