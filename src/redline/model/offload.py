"""Saved activations in host memory: what a layer keeps for backward leaves the device, and is brought back.

In forward every storage that a layer saves is copied to pinned host memory on a stream of its own, while the
next layers compute. Two layers may be on their way: before another begins, the device waits for the copies of
the first and has its memory back, so that what it holds does not grow where computing outruns the link. In
backward the first tensor that a layer asks for starts the way back of all that the layer before it saved, so
that one layer computes while the next one's tensors travel. Whole storages move, once each, however many of
their views are saved.

Parameters, and what all layers share, stay. On a CPU the copies are plain ones: same bits, nothing saved.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 16  # below this a copy costs more than the memory is worth
MOST_LEAVING = 2  # layers whose copies may be under way


class _Moved:
    """One storage in host memory, and on the device while it is needed."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        flat = _whole(tensor)
        self.device, self._stream = tensor.device, stream
        self._there: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(flat)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)

    def start_back(self) -> None:
        """Begin the way back, if it has not begun."""
        if self._there is not None:
            return
        self._there = torch.empty(self._host.shape, dtype=self._host.dtype, device=self.device)
        if self._stream is None:
            self._there.copy_(self._host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the memory may be in use until now
        with torch.cuda.stream(self._stream):
            self._there.copy_(self._host, non_blocking=True)
            self._arrived = self._stream.record_event()
        self._there.record_stream(self._stream)

    def back(self) -> Tensor:
        """The bytes on the device."""
        self.start_back()
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        assert self._there is not None
        return self._there


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor as a view of a moved storage."""

    moved: _Moved
    layer: _Layer
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor again."""
        if self.layer.before is not None:
            self.layer.before.start_back()
        typed = self.moved.back().view(self.dtype)
        return typed.as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True, weakref_slot=True)
class _Layer:
    """What one layer of one forward saved. Storages live as long as a saved tensor needs them.

    Attributes:
        before: the layer before it, for which backward asks next.
        held: what is being copied: the device may not use that memory for anything else before `copied`.
    """

    before: _Layer | None
    storages: dict[int, weakref.ref[_Moved]] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)
    copied: torch.cuda.Event | None = None

    def start_back(self) -> None:
        """Begin the way back of everything that is still needed."""
        for reference in self.storages.values():
            if (moved := reference()) is not None:
                moved.start_back()

    def let_go(self) -> None:
        """The current stream waits for the copies; what it allocates from here on may lie where they read."""
        if self.copied is not None:
            torch.cuda.current_stream(self.held[0].device).wait_event(self.copied)
        self.held.clear()


class Offload:
    """Moves what the first layers save; one for a whole forward pass.

    Args:
        layers: how many layers move.
        kept: tensors whose storages stay where they are: parameters, rotary tables.
        stream: that copies run on; None (a CPU) copies at once.
    """

    def __init__(self, layers: int, kept: Iterable[Tensor], stream: torch.cuda.Stream | None) -> None:
        self._layers, self._stream = layers, stream
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._last: _Layer | None = None
        self._leaving: deque[_Layer] = deque()

    def done(self) -> None:
        """After the last layer: what is still on its way leaves by itself."""
        for layer in self._leaving:
            for tensor in layer.held:
                assert self._stream is not None
                tensor.record_stream(self._stream)
            layer.held.clear()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """What is saved for backward inside moves to host memory, if layer `index` is one that moves."""
        if len(self._leaving) == MOST_LEAVING or (self._leaving and index >= self._layers):
            self._leaving.popleft().let_go()
        if index >= self._layers:
            yield
            return
        layer = self._last = _Layer(self._last)
        held = layer.held  # also so that no address is used twice meanwhile

        def pack(tensor: Tensor) -> Tensor | _View:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._kept or storage.nbytes() < SMALLEST_BYTES:
                return tensor
            reference = layer.storages.get(storage.data_ptr())
            moved = None if reference is None else reference()
            if moved is None:
                moved = _Moved(tensor, self._stream)
                layer.storages[storage.data_ptr()] = weakref.ref(moved)
                held.append(tensor)
            offset = int(tensor.storage_offset())
            return _View(moved, layer, tensor.dtype, tensor.shape, tensor.stride(), offset)

        def unpack(saved: Tensor | _View) -> Tensor:
            return saved.tensor() if isinstance(saved, _View) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        if self._stream is None:
            held.clear()
        elif held:
            layer.copied = self._stream.record_event()
            self._leaving.append(layer)


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
