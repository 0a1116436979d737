"""Forward and backward of a microbatch as one CUDA graph: recorded once, then replayed for every microbatch.

A graph repeats the same kernels on the same addresses. What differs between microbatches is copied into
buffers that it reads: the batch, the weight of the loss, the iteration that dropout counts by. Everything it
writes is there for good anyway: main_grad is the flat buffer, the loss one number.

The first steps run as they are, on the stream of the recording: kernels are compiled and chosen then, and
autograd's nodes of the parameters, which remember their stream, are made there. The update, evaluation and
the collectives stay outside the graph. A microbatch of another size is an error, never an eager run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from redline.data import Microbatch
from redline.errors import TrainingError, first_line
from redline.units import format_duration

Run = Callable[[Microbatch, Tensor, Tensor], Tensor]


class MicrobatchGraph:
    """Does what `run` does, from a recording after the first `warmup_steps` steps.

    Args:
        run: forward and backward of (microbatch, weight of its loss, iteration), all on the device; adds to
            main_grad and returns the loss, detached.
        warmup_steps: optimizer steps before the recording, at least 1.
        say: told when the graph is there.
    """

    def __init__(
        self, run: Run, device: torch.device, warmup_steps: int, say: Callable[[str], object]
    ) -> None:
        assert warmup_steps > 0, "kernels that are not compiled yet cannot be recorded"
        self._run, self._warmup_steps, self._say = run, warmup_steps, say
        self._stream = torch.cuda.Stream(device)
        self._steps = 0
        self._inputs: tuple[Microbatch, Tensor, Tensor] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None

    def next_step(self) -> None:
        """A new optimizer step begins."""
        self._steps += 1

    def __call__(self, batch: Microbatch, weight: Tensor, iteration: Tensor) -> Tensor:
        """The loss of one microbatch, valid until the next call.

        Raises: TrainingError when the microbatch has another size than the first, or cannot be recorded.
        """
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            self._fill(batch, weight, iteration)
            loss = self._warm() if self._steps <= self._warmup_steps else self._replay()
        here.wait_stream(self._stream)
        return loss

    def _fill(self, batch: Microbatch, weight: Tensor, iteration: Tensor) -> None:
        """Copy what differs into the buffers that the graph reads."""
        if self._inputs is None:
            held = batch.to(self._stream.device)
            self._inputs = (held, weight.clone(), iteration.clone())
            return
        held, held_weight, held_iteration = self._inputs
        held_weight.copy_(weight)
        held_iteration.copy_(iteration)
        for (name, target), (_, source) in zip(_tensors(held), _tensors(batch), strict=True):
            if target.shape != source.shape:
                raise TrainingError(
                    f"--cuda-graph-impl local: {name} of a microbatch is {tuple(source.shape)}, "
                    f"recorded for {tuple(target.shape)}.",
                    why="a graph replays kernels of fixed sizes.",
                    mend="leave --cuda-graph-impl out.",
                )
            target.copy_(source, non_blocking=True)

    def _warm(self) -> Tensor:
        assert self._inputs is not None
        return self._run(*self._inputs)

    def _replay(self) -> Tensor:
        if self._graph is None:
            self._record()
        assert self._graph is not None and self._loss is not None
        self._graph.replay()
        return self._loss

    def _record(self) -> None:
        """Record the kernels of a microbatch; none of them runs yet."""
        assert self._inputs is not None
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (loader, checkpoint writer) may use the device meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._run(*self._inputs)
        except RuntimeError as error:
            raise TrainingError(
                "--cuda-graph-impl local: a microbatch could not be recorded.",
                why=f"{first_line(error).rstrip('.')}.",
                mend="leave --cuda-graph-impl out.",
            ) from error
        self._graph = graph
        took = format_duration(time.perf_counter() - started)
        self._say(f"a microbatch is recorded as a CUDA graph, in {took}; it is replayed from now on.")


def _tensors(batch: Microbatch) -> list[tuple[str, Tensor]]:
    """Every tensor of a microbatch, by name."""
    found = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    if batch.documents is not None:
        found.append(("cu_seqlens", batch.documents.cu_seqlens))
    return [(name, value) for name, value in found if isinstance(value, Tensor)]
