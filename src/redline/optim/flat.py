"""Flat storage of parameters, gradients and optimizer state.

Every parameter is a view of one long buffer, and so are its gradient, its main (full precision) copy and
its two Adam moments. A step then is a few long kernels in place of a few per parameter, zeroing the
gradients is one memset, and data-parallel ranks send buckets of it and own shards of it.

Layout
    buffers   one set for each (parameter dtype, gradient dtype); frozen parameters (requires_grad False)
              have a set of their own, without gradient, main copy or moments
    order     reverse registration, about the order in which backward finishes
    start     each parameter starts at a multiple of 64 elements; the padding in between is zero and stays
              zero
    main      where the main dtype is the parameter's, `main_param` and `param` are one storage; with
              `remainder`, a bf16 parameter and the int16 kept as `main_param` are together the fp32 value
    fp8       a parameter of one byte an element is a code that needs a scale: nothing here writes or reads
              it, whoever knows the scales does (`fp8_parts`)
    moments   of their dtype, or codes of 8 bits with the top of each block beside them (states.py)
    buckets   ranges of the buffer that are reduced and gathered as a whole (formulas/buckets.py)
    shards    what the optimizer updates. With a distributed optimizer each rank holds main parameters and
              moments of its own part of every bucket alone; of what is kept in host memory a shard is one
              chunk

Gradients reach `param.main_grad` in two ways. A GEMM site adds its weight gradient there itself and hands
autograd None. Every other parameter gets an ordinary gradient, which a hook adds to `main_grad` and drops.
Freezing is decided before the buffers are made; a parameter without a gradient in some step keeps a zero
`main_grad`, so its moments and weight decay go on as with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from redline.formulas.buckets import ALIGNMENT, BucketRule, cut_buckets
from redline.formulas.state import AWAY_CHUNK
from redline.kernels.adamw import join_main, split_main
from redline.optim.buffer import MOMENTS, Buffer, Kind, Range, Sharding, Slot
from redline.optim.pieces import Pieces, pieces_of
from redline.optim.states import (
    CODES,
    Storage,
    is_fp8,
    is_remainder,
    is_stored_as_it_is,
    numbers,
    round_main,
    store_moment,
    widen,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """How much of the optimizer states is kept in host memory.

    Attributes:
        share: of the elements of each bucket, from its begin.
        chunk: elements that travel together.
    """

    share: float = 0.0
    chunk: int = AWAY_CHUNK

    def cut(self, window: Range) -> Iterator[tuple[Range, bool]]:
        """The window in parts, with whether each is away: chunk by chunk, and then what stays."""
        start, end = window
        border = start + round(self.share * (end - start) / ALIGNMENT) * ALIGNMENT
        for first in range(start, border, self.chunk):
            yield (first, min(first + self.chunk, border)), True
        if border < end:
            yield (border, end), False


class FlatBuffers:
    """Moves parameters into flat buffers and gives out views of them.

    Args:
        named_parameters: as from `Module.named_parameters()`, on any device, meta included. A parameter met
            under several names (tied) is stored once, under the first. Values are kept; a meta parameter
            becomes zero.
        main_dtype: of the main parameters that the optimizer updates.
        grad_dtype: of `main_grad`.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments; None means `main_dtype`, torch.uint8 codes of 8 bits.
        remainder: keep of the main parameters of bf16 ones the 16 bits that these lack (2 bytes, not 4).
        device: of all buffers; the parameters move there.
        sharding: how data-parallel ranks share the buffers; None: not at all.
        away: what of the optimizer states is kept in host memory; None: nothing.

    Attributes:
        buffers: whole flat buffers, of parameters and gradients, and of all else that is not in shards.
        shards: what the optimizer updates: parts of every bucket, or the whole buffers.
        parameters: by name, in registration order.

    Afterwards `param.data` and `param.main_grad` are views of the buffers. Main parameters start as the
    parameters' values. Whoever then writes the parameters calls `sync_main_params`, whoever writes the main
    ones `sync_params`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        main_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        remainder: bool = False,
        device: torch.device | str,
        sharding: Sharding | None = None,
        away: Away | None = None,
    ) -> None:
        self.main_dtype = main_dtype
        self.sharding, self.away = sharding or Sharding(), away or Away()
        self._grad_dtype = grad_dtype
        self.storage = Storage(
            main=main_dtype,
            exp_avg=exp_avg_dtype or main_dtype,
            exp_avg_sq=exp_avg_sq_dtype or main_dtype,
            remainder=remainder,
        )
        self.device = torch.device(device)

        named: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, param in named_parameters:
            if id(param) not in seen:
                seen.add(id(param))
                named[name] = param

        groups: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name in reversed(named):
            groups.setdefault((named[name].dtype, named[name].requires_grad), {})[name] = named[name]
        self.parameters = named
        self._order = {name: place for place, name in enumerate(named)}
        self.buffers = tuple(self._make_buffer(group, *key) for key, group in groups.items())
        self.shards = tuple(shard for buffer in self.buffers for shard in self._make_shards(buffer))
        places = {slot.name: (buffer, slot) for buffer in self.buffers for slot in buffer.slots}
        self._places = {name: places[name] for name in named}  # registration order

    def _make_buffer(self, group: dict[str, nn.Parameter], dtype: torch.dtype, trainable: bool) -> Buffer:
        rule = self.sharding.rule if trainable else BucketRule()
        layout = cut_buckets((param.numel() for param in group.values()), rule)
        slots = [
            Slot(name, start, param.shape)
            for (name, param), start in zip(group.items(), layout.starts, strict=True)
        ]

        flat = torch.zeros(layout.size, dtype=dtype, device=self.device)
        tensors: dict[Kind, Tensor] = {"param": flat}
        if trainable:
            tensors["main_grad"] = torch.zeros_like(flat, dtype=self._grad_dtype)
        for slot, param in zip(slots, group.values(), strict=True):
            _move(param, slot.view(flat))
            if trainable:
                param.main_grad = slot.view(tensors["main_grad"])  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(accumulate_main_grad)
        if not trainable:
            tensors["main_param"] = flat
        elif not self._in_shards:
            tensors |= self.storage.make(flat)
        return Buffer(tuple(slots), tensors, layout.buckets)

    @property
    def _in_shards(self) -> bool:
        """Whether states are kept by shards, not in whole buffers."""
        return self.sharding.states or self.away.share > 0

    def _make_shards(self, buffer: Buffer) -> Iterator[Buffer]:
        """What the optimizer updates of a buffer; its states are made here where they are in shards."""
        if not buffer.trainable or not self._in_shards:
            yield buffer
            return
        for bucket in buffer.buckets:
            held = self.sharding.own(bucket) if self.sharding.states else bucket
            for window, away in self.away.cut(held):
                part = slice(*window)
                tensors: dict[Kind, Tensor] = {
                    "param": buffer.tensors["param"][part],
                    "main_grad": buffer.tensors["main_grad"][part],
                }
                tensors |= self.storage.make(tensors["param"], away=away)
                yield Buffer(buffer.slots, tensors, (bucket,), window, away)

    def first_use(self, names: Iterable[str]) -> int:
        """The place, in registration order, of the first of these parameters, or behind all of them.

        It is read first of them in forward, and its gradient is complete last.
        """
        return min((self._order[name] for name in names), default=len(self._order))

    def _held(self, buffer: Buffer) -> list[Buffer]:
        """What holds the optimizer states of a flat buffer."""
        return [shard for shard in self.shards if shard.slots is buffer.slots]

    def pieces(self, kind: Kind) -> dict[str, Pieces]:
        """What this rank holds of a kind that is kept by shards, by name.

        Where the stored form is not the numbers themselves, the pieces are a copy in host memory.
        """
        held = {
            id(buffer.slots): [(shard.range[0], numbers(shard, kind)) for shard in self._held(buffer)]
            for buffer in self.buffers
            if buffer.trainable and kind not in buffer.tensors
        }
        return {
            name: pieces_of(slot.shape, self.storage.values(kind), slot.start, held[id(buffer.slots)])
            for name, (buffer, slot) in self._places.items()
            if id(buffer.slots) in held
        }

    def _write_shards(self, buffer: Buffer, slot: Slot, main: Tensor) -> None:
        """Store a whole main parameter: all of it as the parameter, and what is held in full precision."""
        halves = self.storage.main_beside(buffer.tensors["param"].dtype) == torch.int16
        param, kept = split_main(main) if halves else (main, main)
        round_main(param, slot.view(buffer.tensors["param"]))
        for shard in self._held(buffer):
            low, high = _overlap(shard, slot.start, slot.end)
            if low < high:
                part = kept.reshape(-1)[low - slot.start : high - slot.start]
                shard.tensors["main_param"][low - shard.range[0] : high - shard.range[0]].copy_(part)

    def fp8_parts(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Of each parameter in fp8, by name: (main parameter, parameter) of what this rank updates, flat."""
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for shard in self.shards:
            if not is_fp8(shard.tensors["param"]):
                continue
            for slot in shard.slots:
                parts = found.setdefault(slot.name, [])
                low, high = (place - shard.range[0] for place in _overlap(shard, slot.start, slot.end))
                if low < high:
                    parts.append((shard.tensors["main_param"][low:high], shard.tensors["param"][low:high]))
        return found

    def flat(self, kind: Kind) -> list[Tensor]:
        """The flat buffers of a kind, padding included."""
        return [buffer.tensors[kind] for buffer in self.buffers if kind in buffer.tensors]

    def views(self, kind: Kind) -> dict[str, Tensor]:
        """Parameter-shaped views by name, in registration order: what a checkpoint reads and fills.

        What is in shards is not among them (`pieces`). A frozen parameter appears under "param" and
        "main_param" only; "main_param" thus names every weight once. Main parameters stored as a remainder
        and moments stored in 8 bits are given as new tensors in host memory, with the exact numbers;
        `write_main_params` and `write_moments` take such values back.
        """
        return {
            name: slot.view(buffer.tensors[kind])
            if is_stored_as_it_is(buffer, kind)
            else numbers(buffer, kind, slot.start, slot.end).view(slot.shape)
            for name, (buffer, slot) in self._places.items()
            if kind in buffer.tensors
        }

    def write_main_params(self) -> Iterator[tuple[str, Tensor]]:
        """Each main parameter to be filled, one after the other; what it was filled with is then stored.

        The parameters follow.
        """
        for name, (buffer, slot) in self._places.items():
            param = slot.view(buffer.tensors["param"])
            if "main_param" not in buffer.tensors:  # in shards: filled whole, and kept in part
                whole = torch.zeros(slot.shape, dtype=self.main_dtype, device=self.device)
                yield name, whole
                self._write_shards(buffer, slot, whole)
                continue
            stored = slot.view(buffer.tensors["main_param"])
            if is_remainder(buffer):
                main = join_main(param, stored)
                yield name, main
                for half, part in zip((param, stored), split_main(main), strict=True):
                    half.copy_(part)
            else:
                yield name, stored
                round_main(stored, param)

    def write_moments(self) -> Iterator[tuple[Kind, str, Tensor]]:
        """Each moment that is stored in 8 bits, in fp32, to be filled; what is held of it is then stored."""
        for kind in MOMENTS:
            if self.storage.moment(kind) != CODES:
                continue
            for name, (buffer, slot) in self._places.items():
                if not buffer.trainable:
                    continue
                whole = torch.zeros(slot.padded_end - slot.start, device=self.device)
                yield kind, name, whole[: slot.shape.numel()].view(slot.shape)
                for shard in self._held(buffer):
                    low, high = _overlap(shard, slot.start, slot.padded_end)
                    if low < high:
                        store_moment(
                            shard, kind, low - shard.range[0], whole[low - slot.start : high - slot.start]
                        )

    def zero_grad(self) -> None:
        """Set every main gradient to zero: one memset a buffer."""
        for main_grad in self.flat("main_grad"):
            main_grad.zero_()

    def sync_params(self) -> None:
        """Round the main parameters into the parameters; nothing to do where these are part of them.

        With sharded states that is the own part of each parameter; the others must then be gathered.
        """
        for shard in self.shards:
            round_main(shard.tensors["main_param"], shard.tensors["param"])

    def sync_main_params(self) -> None:
        """Widen the parameters into the main parameters, after something wrote the parameters themselves."""
        for shard in self.shards:
            widen(shard.tensors["param"], shard.tensors["main_param"])


def _overlap(shard: Buffer, start: int, end: int) -> Range:
    """The part of elements start .. end that a shard holds; nothing where it ends before it begins."""
    return max(shard.range[0], start), min(shard.range[1], end)


def accumulate_main_grad(param: Tensor) -> None:
    """Add an ordinary gradient to `param.main_grad` and drop it: the hook of every trainable parameter.

    It also fires, with nothing to do, for a weight whose site returned None.
    """
    if param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None


def _move(param: nn.Parameter, view: Tensor) -> None:
    """Make `view` the parameter's storage. Its value and the object stay: modules and ties hold it."""
    if param.is_meta:  # assigning `.data` cannot leave the meta device
        real = nn.Parameter(view, requires_grad=param.requires_grad)
        real.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, real)
    else:
        view.copy_(param.detach())
        param.data = view
