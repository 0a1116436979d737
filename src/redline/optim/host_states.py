"""Optimizer states that are kept in host memory, and pass through the device in each step.

What is away - main parameters and moments of some shards, in pinned memory - comes to a stage on the device,
is updated there by the kernel that updates everything else, and goes back: the same bits as without. Both
ways run on streams of their own, with two stages: while one chunk is updated the next one comes and the one
before goes. Without overlap there is one stage, and all in order on one stream.

On a CPU host and device are one memory: the copies are plain ones, and nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redline.optim.buffer import Buffer, Kind

STAYS: tuple[Kind, ...] = ("param", "main_grad")


class HostStates:
    """The shards `chunks`, whose states are in host memory.

    Args:
        device: where they are updated.
        overlap: let chunks travel while another one is updated.

    Attributes:
        buffers: for each chunk its place on the device; several share one stage, so that its states are only
            there inside `run`.
        stages_bytes: of all stages.
    """

    def __init__(self, chunks: Sequence[Buffer], device: torch.device, *, overlap: bool) -> None:
        self._chunks = chunks
        self._travels = [_travelling(chunk) for chunk in chunks]
        self._ahead = min(overlap, len(chunks) - 1) if chunks else 0
        stages = [self._make_stage(device) for _ in range(1 + self._ahead)]
        self.stages_bytes = sum(each.nbytes for stage in stages for each in stage.values())
        self._staged = [
            {kind: stages[index % len(stages)][kind, host.dtype][: len(host)] for kind, host in held.items()}
            for index, held in enumerate(self._travels)
        ]
        self.buffers = tuple(
            replace(chunk, tensors=chunk.tensors | staged, away=False)
            for chunk, staged in zip(chunks, self._staged, strict=True)
        )
        self._device = device
        self._up: torch.cuda.Stream | None = None
        self._down: torch.cuda.Stream | None = None
        if device.type == "cuda" and self._ahead:
            self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arrived: list[torch.cuda.Event | None] = [None] * len(chunks)
        self._left: list[torch.cuda.Event | None] = [None] * len(stages)  # by stage: it is free again

    def _make_stage(self, device: torch.device) -> dict[tuple[Kind, torch.dtype], Tensor]:
        """Room for the largest chunk."""
        sizes: dict[tuple[Kind, torch.dtype], int] = {}
        for held in self._travels:
            for kind, host in held.items():
                key = kind, host.dtype
                sizes[key] = max(sizes.get(key, 0), len(host))
        return {key: torch.empty(size, dtype=key[1], device=device) for key, size in sizes.items()}

    def run(self, apply: Callable[[int], None]) -> None:
        """Bring each chunk, `apply(index)`, and take it back; all of it is back for what comes after."""
        if self._up is not None:
            self._up.wait_stream(torch.cuda.current_stream(self._device))
        for index in range(len(self._chunks)):
            if index == 0 or not self._ahead:
                self.bring(index)
            if self._ahead and index + 1 < len(self._chunks):
                self.bring(index + 1)
            if (arrived := self._arrived[index]) is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            apply(index)
            self.take_back(index)
        if self._down is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._down)

    def bring(self, index: int) -> None:
        """Start the way of a chunk to its stage."""
        with torch.cuda.stream(self._up):
            if self._up is not None and (left := self._left[index % len(self._left)]) is not None:
                self._up.wait_event(left)
            for kind, host in self._travels[index].items():
                self._staged[index][kind].copy_(host, non_blocking=True)
            if self._up is not None:
                self._arrived[index] = self._up.record_event()

    def take_back(self, index: int) -> None:
        """Start its way back, which begins once all queued work on it is done."""
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for kind, host in self._travels[index].items():
                host.copy_(self._staged[index][kind], non_blocking=True)
            if self._down is not None:
                self._left[index % len(self._left)] = self._down.record_event()


def _travelling(chunk: Buffer) -> dict[Kind, Tensor]:
    """What is in host memory; main parameters that are the parameters themselves stay."""
    param = chunk.tensors["param"]
    return {kind: held for kind, held in chunk.tensors.items() if kind not in STAYS and held is not param}
