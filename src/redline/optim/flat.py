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
    buckets   ranges of the buffer that are reduced and gathered as a whole (formulas/buckets.py)
    shards    with a distributed optimizer each rank holds main parameters and moments of its own part of
              every bucket alone: `shards` are those parts, and what the optimizer updates

Gradients reach `param.main_grad` in two ways. A GEMM site adds its weight gradient there itself and hands
autograd None. Every other parameter gets an ordinary gradient, which a hook adds to `main_grad` and drops.
Freezing is decided before the buffers are made; a parameter without a gradient in some step keeps a zero
`main_grad`, so its moments and weight decay go on as with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from redline.formulas.buckets import ALIGNMENT, BucketRule, cut_buckets, shard_of
from redline.kernels.adamw import join_main, split_main
from redline.optim.pieces import Pieces, pieces_of

Kind = Literal["param", "main_param", "main_grad", "exp_avg", "exp_avg_sq"]
Range = tuple[int, int]

MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
CHUNK = 1 << 24  # elements of a main parameter joined at a time: whole rows of the norm's sum


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its buffers: `start` and `shape` in elements."""

    name: str
    start: int
    shape: torch.Size

    @property
    def end(self) -> int:
        """One past the parameter's last element."""
        return self.start + self.shape.numel()

    @property
    def padded_end(self) -> int:
        """Where the next parameter may start."""
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def view(self, flat: Tensor) -> Tensor:
        """The parameter-shaped view of a flat buffer."""
        return flat[self.start : self.end].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Who holds what of each bucket.

    Attributes:
        rule: how buckets are cut; `rule.ranks` share each of them.
        index: of this rank among them.
        states: main parameters and moments exist for the own shard alone (the distributed optimizer).
    """

    rule: BucketRule = field(default_factory=BucketRule)
    index: int = 0
    states: bool = False

    def own(self, bucket: Range) -> Range:
        """This rank's part of a bucket."""
        return shard_of(bucket, self.rule.ranks, self.index)


@dataclass(frozen=True, slots=True)
class Buffer:
    """The flat tensors of one (parameter dtype, gradient dtype); frozen: param and main_param only.

    Attributes:
        slots: the parameters of the whole flat buffer.
        tensors: by kind, each of the elements in `window`.
        buckets: of the whole flat buffer.
        window: (first, last) element that the tensors hold; None: all.
    """

    slots: tuple[Slot, ...]
    tensors: dict[Kind, Tensor]
    buckets: tuple[Range, ...] = ()
    window: Range | None = None

    @property
    def trainable(self) -> bool:
        """Whether these parameters have gradients and moments."""
        return "main_grad" in self.tensors


class FlatBuffers:
    """Moves parameters into flat buffers and gives out views of them.

    Args:
        named_parameters: as from `Module.named_parameters()`, on any device, meta included. A parameter met
            under several names (tied) is stored once, under the first. Values are kept; a meta parameter
            becomes zero.
        main_dtype: of the main parameters that the optimizer updates.
        grad_dtype: of `main_grad`.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments; None means `main_dtype`.
        remainder: keep of the main parameters of bf16 ones the 16 bits that these lack (2 bytes, not 4).
        device: of all buffers; the parameters move there.
        sharding: how data-parallel ranks share the buffers; None: not at all.

    Attributes:
        buffers: whole flat buffers, of parameters and gradients, and of all else that is not sharded.
        shards: what the optimizer updates: the own part of every bucket, or the whole buffers.
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
    ) -> None:
        self.main_dtype, self._remainder = main_dtype, remainder
        self.sharding = sharding or Sharding()
        self._dtypes: dict[Kind, torch.dtype] = {
            "main_grad": grad_dtype,
            "exp_avg": exp_avg_dtype or main_dtype,
            "exp_avg_sq": exp_avg_sq_dtype or main_dtype,
        }
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

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(layout.size, dtype=dtype, device=self.device)

        flat = zeros(dtype)
        tensors: dict[Kind, Tensor] = {"param": flat, "main_param": flat}
        if trainable and self.sharding.states:
            tensors = {"param": flat, "main_grad": zeros(self._dtypes["main_grad"])}
        elif trainable:
            if dtype != self.main_dtype:
                tensors["main_param"] = zeros(self._main_storage(dtype))
            tensors |= {kind: zeros(kind_dtype) for kind, kind_dtype in self._dtypes.items()}
        for slot, param in zip(slots, group.values(), strict=True):
            _move(param, slot.view(flat))
            if trainable:
                param.main_grad = slot.view(tensors["main_grad"])  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(accumulate_main_grad)
        if "main_param" in tensors:
            _widen(flat, tensors["main_param"])
        return Buffer(tuple(slots), tensors, layout.buckets)

    def _main_storage(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that main parameters are kept in beside parameters of `dtype`."""
        return torch.int16 if self._remainder and dtype == torch.bfloat16 else self.main_dtype

    def _make_shards(self, buffer: Buffer) -> Iterator[Buffer]:
        """What the optimizer updates of a buffer; its states are made here where they are sharded."""
        if not buffer.trainable or not self.sharding.states:
            yield buffer
            return
        for bucket in buffer.buckets:
            start, end = window = self.sharding.own(bucket)
            param, main_grad = (buffer.tensors[kind][start:end] for kind in ("param", "main_grad"))
            tensors: dict[Kind, Tensor] = {"param": param, "main_param": param, "main_grad": main_grad}
            if param.dtype != self.main_dtype:
                tensors["main_param"] = param.new_zeros(end - start, dtype=self._main_storage(param.dtype))
                _widen(param, tensors["main_param"])
            for kind in MOMENTS:
                tensors[kind] = torch.zeros(end - start, dtype=self._dtypes[kind], device=self.device)
            yield Buffer(buffer.slots, tensors, (bucket,), window)

    def _windows(self, buffer: Buffer) -> list[tuple[Range, Buffer]]:
        """The own shards of a flat buffer, each with its range of elements."""
        return [
            (shard.window, shard)
            for shard in self.shards
            if shard.window is not None and shard.slots is buffer.slots
        ]

    def pieces(self, kind: Kind) -> dict[str, Pieces]:
        """What this rank holds of a kind of which every rank holds its own shards, by name.

        Where a main parameter is stored as a remainder, the pieces are a copy in host memory.
        """
        dtype = self.main_dtype if kind == "main_param" else self._dtypes.get(kind, self.main_dtype)
        held = {
            id(buffer.slots): [
                (window[0], _joined(shard) if kind == "main_param" else shard.tensors[kind])
                for window, shard in self._windows(buffer)
            ]
            for buffer in self.buffers
            if buffer.trainable and kind not in buffer.tensors
        }
        return {
            name: pieces_of(slot.shape, dtype, slot.start, held[id(buffer.slots)])
            for name, (buffer, slot) in self._places.items()
            if id(buffer.slots) in held
        }

    def _write_shards(self, buffer: Buffer, slot: Slot, main: Tensor) -> None:
        """Store a whole main parameter: all of it as the parameter, and the own part in full precision."""
        halves = self._main_storage(buffer.tensors["param"].dtype) == torch.int16
        param, kept = split_main(main) if halves else (main, main)
        slot.view(buffer.tensors["param"]).copy_(param)
        for (first, last), shard in self._windows(buffer):
            low, high = max(first, slot.start), min(last, slot.end)
            if low < high:
                part = kept.reshape(-1)[low - slot.start : high - slot.start]
                shard.tensors["main_param"][low - first : high - first].copy_(part)

    def flat(self, kind: Kind) -> list[Tensor]:
        """The flat buffers of a kind, padding included."""
        return [buffer.tensors[kind] for buffer in self.buffers if kind in buffer.tensors]

    def views(self, kind: Kind) -> dict[str, Tensor]:
        """Parameter-shaped views by name, in registration order: what a checkpoint reads and fills.

        What is sharded is not among them (`pieces`). A frozen parameter appears under "param" and
        "main_param" only; "main_param" thus names every weight once. Where a main parameter is stored as a
        remainder it is given as a new tensor in host memory, with the exact value; `write_main_params` takes
        such values back.
        """
        if kind == "main_param":
            whole = [name for name, (buffer, _) in self._places.items() if kind in buffer.tensors]
            return {name: self._main_view(name, device="cpu") for name in whole}
        return {
            name: slot.view(buffer.tensors[kind])
            for name, (buffer, slot) in self._places.items()
            if kind in buffer.tensors
        }

    def write_main_params(self) -> Iterator[tuple[str, Tensor]]:
        """Each main parameter to be filled, one after the other; what it was filled with is then stored.

        The parameters follow.
        """
        for name, (buffer, slot) in self._places.items():
            if "main_param" not in buffer.tensors:  # in shards: filled whole, and kept in part
                whole = torch.zeros(slot.shape, dtype=self.main_dtype, device=self.device)
                yield name, whole
                self._write_shards(buffer, slot, whole)
                continue
            main = self._main_view(name, device=self.device)
            yield name, main
            if is_remainder(buffer):
                param, remainder = split_main(main)
                slot.view(buffer.tensors["param"]).copy_(param)
                slot.view(buffer.tensors["main_param"]).copy_(remainder)
            else:
                _round(slot.view(buffer.tensors["main_param"]), slot.view(buffer.tensors["param"]))

    def _main_view(self, name: str, device: torch.device | str) -> Tensor:
        """One main parameter: a view, or the joined halves on `device`."""
        buffer, slot = self._places[name]
        main = slot.view(buffer.tensors["main_param"])
        if not is_remainder(buffer):
            return main
        return join_main(slot.view(buffer.tensors["param"]).to(device), main.to(device))

    def zero_grad(self) -> None:
        """Set every main gradient to zero: one memset a buffer."""
        for main_grad in self.flat("main_grad"):
            main_grad.zero_()

    def sync_params(self) -> None:
        """Round the main parameters into the parameters; nothing to do where these are part of them.

        With sharded states that is the own part of each parameter; the others must then be gathered.
        """
        for main_param, param in self._pairs():
            _round(main_param, param)

    def sync_main_params(self) -> None:
        """Widen the parameters into the main parameters, after something wrote the parameters themselves."""
        for main_param, param in self._pairs():
            _widen(param, main_param)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for shard in self.shards:
            yield shard.tensors["main_param"], shard.tensors["param"]


def accumulate_main_grad(param: Tensor) -> None:
    """Add an ordinary gradient to `param.main_grad` and drop it: the hook of every trainable parameter.

    It also fires, with nothing to do, for a weight whose site returned None.
    """
    if param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None


def main_parts(buffer: Buffer, start: int, end: int) -> Iterator[Tensor]:
    """The main parameters of a range of elements, in the main dtype; halves are joined in small parts."""
    param, main = buffer.tensors["param"], buffer.tensors["main_param"]
    if start >= end:
        return
    if not is_remainder(buffer):
        yield main[start:end]
        return
    for first in range(start, end, CHUNK):
        part = slice(first, min(first + CHUNK, end))
        yield join_main(param[part], main[part])


def _joined(shard: Buffer) -> Tensor:
    """The main parameters of a shard: as they are stored, or joined in host memory."""
    param, main = shard.tensors["param"], shard.tensors["main_param"]
    return join_main(param.cpu(), main.cpu()) if is_remainder(shard) else main


def is_remainder(buffer: Buffer) -> bool:
    """Whether its main parameters are the parameters and 16 more bits."""
    return buffer.tensors["main_param"].dtype == torch.int16


def _round(main_param: Tensor, param: Tensor) -> None:
    """Parameters from main parameters."""
    if main_param.data_ptr() != param.data_ptr() and main_param.dtype != torch.int16:
        param.copy_(main_param)


def _widen(param: Tensor, main_param: Tensor) -> None:
    """Main parameters from parameters."""
    if main_param.dtype == torch.int16:
        main_param.zero_()
    elif main_param is not param:
        main_param.copy_(param)


def _move(param: nn.Parameter, view: Tensor) -> None:
    """Make `view` the parameter's storage. Its value and the object stay: modules and ties hold it."""
    if param.is_meta:  # assigning `.data` cannot leave the meta device
        real = nn.Parameter(view, requires_grad=param.requires_grad)
        real.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, real)
    else:
        view.copy_(param.detach())
        param.data = view
