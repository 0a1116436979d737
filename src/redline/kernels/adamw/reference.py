"""AdamW over a flat buffer in plain PyTorch; the exact split of an fp32 main parameter into 16 + 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from redline.kernels.adamw.codes import decode, encode_into, noise_of, round_bf16

BLOCK = 1024  # elements that one program of the kernel updates, 256 a warp; `Segments.first` is made for it
ROUNDED = (torch.bfloat16, torch.uint8)  # moments of these dtypes are rounded by noise


@dataclass(frozen=True, slots=True)
class FlatState:
    """One flat buffer: contiguous 1-d tensors of the same length, updated in place.

    Attributes:
        param: what the model computes with; bf16, fp16 or fp32.
        grad: fp32, bf16 or fp16; read.
        exp_avg, exp_avg_sq: the moments, fp32, bf16, or uint8 codes (codes.py) beside their tops. bf16 and
            codes are rounded up or down by noise, so that steps finer than theirs count in the mean.
        main: the main parameter: None where `param` is it; a float tensor; or, beside a bf16 param, the int16
            remainder that together with it is the exact fp32 main parameter.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    main: Tensor | None = None
    exp_avg_top: Tensor | None = None
    exp_avg_sq_top: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of one step: `values` is float64 [3 + 2 G] on the device, the rest does not change.

    values = [1 / (1 - beta1^t), 1 / (1 - beta2^t), salt, lr of group 0, weight decay of group 0, ...]; the
    salt is that of the noise by which moments are rounded to 8 or 16 bits.
    """

    values: Tensor
    beta1: float
    beta2: float
    eps: float

    @property
    def num_groups(self) -> int:
        """Groups that have an lr and a weight decay here."""
        return (len(self.values) - 3) // 2


@dataclass(frozen=True, slots=True)
class Segments:
    """Which elements of a flat buffer follow which group of `Hyper`.

    Segment i is [starts[i], starts[i + 1]); `first` says of each block of the kernel where it begins.
    `bounds` and `group_of` are `starts` and `groups` on the host; `num_groups` is above all of them.
    """

    bounds: tuple[int, ...]
    group_of: tuple[int, ...]
    num_groups: int
    starts: Tensor  # int64 [segments + 1]
    groups: Tensor  # int32 [segments]
    first: Tensor  # int32 [blocks]


def join_main(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 main parameter of a bf16 parameter and its int16 remainder."""
    high = param.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def split_main(main: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16 parameter, int16 remainder) of an fp32 main parameter; `join_main` gives its exact bits back.

    The parameter is the main parameter rounded to nearest, a tie away from zero: with the other tie the
    remainder would need a seventeenth bit. A NaN becomes the canonical one.
    """
    bits = torch.where(main.isnan(), torch.nan, main).view(torch.int32)
    high = ((bits >> 16) + ((bits >> 15) & 1)).to(torch.int16)  # carry into the exponent is right: up to inf
    return high.view(torch.bfloat16), bits.to(torch.int16)


def adamw_reference(
    state: FlatState,
    hyper: Hyper,
    segments: Segments | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step in place, in fp32, or fp64 for an fp64 main parameter. Reads `found_inf` on the host.

    With g = grad_factor x grad, and t the step (Loshchilov and Hutter 2019, arXiv 1711.05101):
        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        p = p - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)
    """
    if found_inf is not None and found_inf.item() != 0:
        return
    inv_correction1, inv_correction2, salt, *group_values = hyper.values.tolist()
    exp_avg = _read(state.exp_avg, state.exp_avg_top, signed=True)
    exp_avg_sq = _read(state.exp_avg_sq, state.exp_avg_sq_top, signed=False)
    exact = torch.empty_like(exp_avg, dtype=torch.float32)  # main parameters before they are rounded
    bounds = (0, len(state.param)) if segments is None else segments.bounds
    for index, (start, end) in enumerate(pairwise(bounds)):
        group = 0 if segments is None else segments.group_of[index]
        lr, weight_decay = group_values[2 * group : 2 * group + 2]
        cut = slice(start, end)
        param, main = state.param[cut], None if state.main is None else state.main[cut]
        p = _read_main(param, main)
        g = state.grad[cut].to(p.dtype)
        if grad_factor is not None:
            g = g * grad_factor.to(p.dtype)
        m = exp_avg[cut].to(p.dtype) * hyper.beta1 + g * (1.0 - hyper.beta1)
        v = exp_avg_sq[cut].to(p.dtype) * hyper.beta2 + g * g * (1.0 - hyper.beta2)
        step = (m * inv_correction1) / ((v * inv_correction2).sqrt() + hyper.eps)
        p = p - lr * (step + weight_decay * p)
        _write_main(p, param, main)
        exact[cut], exp_avg[cut], exp_avg_sq[cut] = p, m, v
    if {state.exp_avg.dtype, state.exp_avg_sq.dtype} & set(ROUNDED):
        noise = noise_of(exact, int(salt))
        _write(exp_avg, noise[0], state.exp_avg, state.exp_avg_top, signed=True)
        _write(exp_avg_sq, noise[1], state.exp_avg_sq, state.exp_avg_sq_top, signed=False)


def _read(moment: Tensor, top: Tensor | None, *, signed: bool) -> Tensor:
    """The moment itself, or a wide copy of the numbers that are stored in fewer bits."""
    if top is not None:
        return decode(moment, top, signed=signed)
    return moment.float() if moment.dtype in ROUNDED else moment


def _write(values: Tensor, noise: Tensor, moment: Tensor, top: Tensor | None, *, signed: bool) -> None:
    """Store what `_read` gave and the step changed, where that was a copy."""
    if top is not None:
        encode_into(moment, top, values, noise, signed=signed)
    elif moment.dtype in ROUNDED:
        moment.copy_(round_bf16(values, noise))


def _read_main(param: Tensor, main: Tensor | None) -> Tensor:
    stored = param if main is None else main
    if stored.dtype == torch.int16:
        return join_main(param, stored)
    return stored if stored.dtype == torch.float64 else stored.float()


def _write_main(value: Tensor, param: Tensor, main: Tensor | None) -> None:
    if main is not None and main.dtype == torch.int16:
        for out, part in zip((param, main), split_main(value), strict=True):
            out.copy_(part)
        return
    param.copy_(value)
    if main is not None:
        main.copy_(value)
