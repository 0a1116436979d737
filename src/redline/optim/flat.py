"""Flat storage of parameters, gradients and optimizer state.

Every parameter is a view of one long buffer, and so are its gradient, its main (full precision) copy and
its two Adam moments. A step then is a few long kernels in place of a few per parameter, zeroing the
gradients is one memset, and a later distributed optimizer cuts the same buffers into ranges.

Layout
    buffers   one set for each (parameter dtype, gradient dtype); frozen parameters (requires_grad False)
              have a set of their own, without gradient, main copy or moments
    order     reverse registration, about the order in which backward finishes
    start     each parameter starts at a multiple of 64 elements; the padding in between is zero and stays
              zero
    main      where the main dtype is the parameter's, `main_param` and `param` are one storage; with
              `remainder`, a bf16 parameter and the int16 kept as `main_param` are together the fp32 value

Gradients reach `param.main_grad` in two ways. A GEMM site adds its weight gradient there itself and hands
autograd None. Every other parameter gets an ordinary gradient, which a hook adds to `main_grad` and drops.
Freezing is decided before the buffers are made; a parameter without a gradient in some step keeps a zero
`main_grad`, so its moments and weight decay go on as with a gradient of zero.

Gradient buckets for data parallelism are no concern of this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from redline.kernels.adamw import join_main, split_main

Kind = Literal["param", "main_param", "main_grad", "exp_avg", "exp_avg_sq"]

CHUNK = 1 << 24  # elements of a main parameter joined at a time: whole rows of the norm's sum
ALIGNMENT = 64  # elements: whole vector loads, no scalar tails, and shards that can be cut at any slot


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


@dataclass(frozen=True, slots=True)
class Buffer:
    """The flat tensors of one (parameter dtype, gradient dtype); frozen: param and main_param only."""

    slots: tuple[Slot, ...]
    tensors: dict[Kind, Tensor]

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
    ) -> None:
        self.main_dtype, self._remainder = main_dtype, remainder
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
        self.buffers = tuple(self._make_buffer(group, *key) for key, group in groups.items())
        places = {slot.name: (buffer, slot) for buffer in self.buffers for slot in buffer.slots}
        self._places = {name: places[name] for name in named}  # registration order

    def _make_buffer(self, group: dict[str, nn.Parameter], dtype: torch.dtype, trainable: bool) -> Buffer:
        slots: list[Slot] = []
        for name, param in group.items():
            slots.append(Slot(name, slots[-1].padded_end if slots else 0, param.shape))
        size = slots[-1].padded_end

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        flat = zeros(dtype)
        tensors: dict[Kind, Tensor] = {"param": flat, "main_param": flat}
        if trainable:
            if dtype != self.main_dtype:
                halves = self._remainder and dtype == torch.bfloat16
                tensors["main_param"] = zeros(torch.int16 if halves else self.main_dtype)
            tensors |= {kind: zeros(kind_dtype) for kind, kind_dtype in self._dtypes.items()}
        for slot, param in zip(slots, group.values(), strict=True):
            _move(param, slot.view(flat))
            if trainable:
                param.main_grad = slot.view(tensors["main_grad"])  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(accumulate_main_grad)
        _widen(flat, tensors["main_param"])
        return Buffer(tuple(slots), tensors)

    def flat(self, kind: Kind) -> list[Tensor]:
        """The flat buffers of a kind, padding included."""
        return [buffer.tensors[kind] for buffer in self.buffers if kind in buffer.tensors]

    def views(self, kind: Kind) -> dict[str, Tensor]:
        """Parameter-shaped views by name, in registration order: what a checkpoint reads and fills.

        A frozen parameter appears under "param" and "main_param" only. "main_param" thus names every weight
        once. Where a main parameter is stored as a remainder it is given as a new tensor in host memory, with
        the exact value; `write_main_params` takes such values back.
        """
        if kind == "main_param":
            return {name: self._main_view(name, device="cpu") for name in self._places}
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
        """Round the main parameters into the parameters; nothing to do where these are part of them."""
        for main_param, param in self._pairs():
            _round(main_param, param)

    def sync_main_params(self) -> None:
        """Widen the parameters into the main parameters, after something wrote the parameters themselves."""
        for main_param, param in self._pairs():
            _widen(param, main_param)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.flat("main_param"), self.flat("param"), strict=True)


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
    if not is_remainder(buffer):
        yield main[start:end]
        return
    for first in range(start, end, CHUNK):
        part = slice(first, min(first + CHUNK, end))
        yield join_main(param[part], main[part])


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
