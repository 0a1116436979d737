"""Main parameters and moments as they are stored, and the numbers that they stand for.

A main parameter is a tensor of its own, or the parameter itself, or the 16 bits that a bf16 parameter lacks.
A moment is a tensor of its dtype, or codes of 8 bits beside their tops (kernels/adamw/codes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.formulas.state import CODE_BLOCK
from redline.kernels.adamw import decode, encode_into, join_main
from redline.kernels.adamw.codes import HALF
from redline.optim.buffer import MOMENTS, TOPS, Buffer, Kind

CODES = torch.uint8
CHUNK = 1 << 24  # elements of a main parameter joined at a time: whole rows of the norm's sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The dtypes of optimizer states.

    Attributes:
        main: of main parameters.
        exp_avg, exp_avg_sq: of the moments; CODES: 8 bits with a top for each block.
        remainder: keep of the main parameters of bf16 ones the 16 bits that these lack (2 bytes, not 4).
    """

    main: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    remainder: bool = False

    def main_beside(self, param: torch.dtype) -> torch.dtype:
        """The dtype in which main parameters are kept beside parameters of dtype `param`."""
        return torch.int16 if self.remainder and param == torch.bfloat16 else self.main

    def moment(self, kind: Kind) -> torch.dtype:
        """The dtype of a moment as it is stored."""
        return self.exp_avg if kind == "exp_avg" else self.exp_avg_sq

    def values(self, kind: Kind) -> torch.dtype:
        """The dtype of the numbers that a kind stands for; codes are exact in bf16."""
        if kind not in MOMENTS:
            return self.main
        return torch.bfloat16 if self.moment(kind) == CODES else self.moment(kind)

    def make(self, param: Tensor, *, away: bool = False) -> dict[Kind, Tensor]:
        """States of the parameters `param` [n]: main parameters of their value, moments of 0.

        Args:
            away: in host memory, from where a GPU reads them directly.
        """

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            if away:
                return torch.zeros(size, dtype=dtype, pin_memory=param.is_cuda)
            return torch.zeros(size, dtype=dtype, device=param.device)

        size = param.numel()
        tensors: dict[Kind, Tensor] = {"main_param": param}
        if param.dtype != self.main:
            tensors["main_param"] = zeros(size, self.main_beside(param.dtype))
            widen(param, tensors["main_param"])
        for kind in MOMENTS:
            tensors[kind] = zeros(size, self.moment(kind))
            if self.moment(kind) == CODES:
                tensors[TOPS[kind]] = zeros(size // CODE_BLOCK, torch.int16)
        return tensors


def is_remainder(buffer: Buffer) -> bool:
    """Whether its main parameters are the parameters and 16 more bits."""
    return buffer.tensors["main_param"].dtype == torch.int16


def is_stored_as_it_is(buffer: Buffer, kind: Kind) -> bool:
    """Whether the tensor of this kind holds the numbers themselves."""
    return not is_remainder(buffer) if kind == "main_param" else buffer.tensors[kind].dtype != CODES


def numbers(buffer: Buffer, kind: Kind, start: int = 0, end: int | None = None) -> Tensor:
    """[end - start] the numbers of a kind: the tensor itself, or a copy in host memory made from what it is.

    Codes are read in whole blocks; a last one may be cut.
    """
    if is_stored_as_it_is(buffer, kind):
        return buffer.tensors[kind][start:end]
    if kind == "main_param":
        param, rest = (buffer.tensors[each][start:end].cpu() for each in ("param", kind))
        return join_main(param, rest)
    codes, tops = buffer.tensors[kind], buffer.tensors[TOPS[kind]]
    end = codes.numel() if end is None else end
    blocks = slice(start // CODE_BLOCK, -(-end // CODE_BLOCK))
    whole = codes[blocks.start * CODE_BLOCK : blocks.stop * CODE_BLOCK]
    values = decode(whole, tops[blocks], signed=kind == "exp_avg")
    return values.bfloat16().cpu()[: end - start]


def store_moment(buffer: Buffer, kind: Kind, start: int, values: Tensor) -> None:
    """Store fp32 `values` [n], whole blocks, as codes from element `start` on, rounded to the nearest."""
    first, last = start // CODE_BLOCK, (start + values.numel()) // CODE_BLOCK
    codes, tops = buffer.tensors[kind][start : start + values.numel()], buffer.tensors[TOPS[kind]][first:last]
    encode_into(codes, tops, values, HALF, signed=kind == "exp_avg")


def main_parts(buffer: Buffer, start: int, end: int) -> Iterator[Tensor]:
    """The main parameters of a range of elements, in the main dtype and on the device, in small parts."""
    param, main = buffer.tensors["param"], buffer.tensors["main_param"]
    if start < end and main.device == param.device and not is_remainder(buffer):
        yield main[start:end]
        return
    for first in range(start, end, CHUNK):
        part = slice(first, min(first + CHUNK, end))
        here = main[part].to(param.device)
        yield join_main(param[part], here) if is_remainder(buffer) else here


def is_fp8(param: Tensor) -> bool:
    """Whether a parameter is stored in a byte an element, whose meaning depends on a scale."""
    return param.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def round_main(main_param: Tensor, param: Tensor) -> None:
    """Parameters from main parameters, but those in fp8."""
    if main_param.data_ptr() != param.data_ptr() and main_param.dtype != torch.int16 and not is_fp8(param):
        param.copy_(main_param)


def widen(param: Tensor, main_param: Tensor) -> None:
    """Main parameters from parameters, but those in fp8."""
    if main_param.dtype == torch.int16:
        main_param.zero_()
    elif main_param is not param and not is_fp8(param):
        main_param.copy_(param)
