"""Adam's moments in 8 bits: the leading bits of fp32 numbers, counted down from the largest of a block.

The exponent of an fp32 number and 3 bits of its mantissa, read as an integer, count steps of 6 to 12 % from
the smallest number up. A block of 64 elements keeps the count of its largest, its top (int16), and an element
keeps how far below the top it lies:

    exp_avg     a sign and 7 bits: zero, and 127 steps, 16 powers of two
    exp_avg_sq  8 bits: zero, and 255 steps, 32 powers of two; below those, but not zero, counts as the last
                step, so that no update is divided by too little

That is 1 + 1/32 bytes an element. Blocks lie within one parameter and one shard (64 is what flat buffers are
aligned to), so codes do not depend on how a buffer is cut.

Rounding is stochastic: a step moves exp_avg_sq by 1 - beta2 at most, less than a code, and to the nearest it
would stand still; so would one in bf16 with a beta2 above 0.996, and moments in bf16 are rounded by the same
noise. That is a hash of the element's new main parameter and the step: no generator has a state to save. What
`decode` gives is encoded into the same codes by any noise, and exact in bf16: a checkpoint holds that.

Blocks with a scale each are those of Dettmers et al. 2021, "8-bit optimizers via block-wise quantization",
arXiv 2110.02861; FP8-LM (Peng et al. 2023, arXiv 2310.18313) keeps exp_avg_sq in 16 bits for want of range,
which a code without a sign has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.formulas.state import CODE_BLOCK

SHIFT = 20  # bits of an fp32 number that are dropped
HALF = 1 << (SHIFT - 1)  # the noise that rounds to the nearest
MAGNITUDE, NAN = 0x7FFFFFFF, 0x7FC00000
WORD = 0xFFFFFFFF


def salt_of(step: int) -> int:
    """What tells the noise of one step from that of another, 32 bits."""
    return step * 0x9E3779B9 & WORD


def noise_of(main: Tensor, salt: int) -> tuple[Tensor, Tensor]:
    """Uniform noise of 20 bits an element, int32, for exp_avg and exp_avg_sq, from the fp32 `main`.

    The hash is MurmurHash3's finalizer (Appleby, public domain).
    """
    word = main.view(torch.int32).long() & WORD ^ salt
    for right, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ word >> right) * factor & WORD
    word ^= word >> 16
    return (word & ((1 << SHIFT) - 1)).int(), (word >> (32 - SHIFT)).int()


def encode(values: Tensor, noise: Tensor | int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 [n], n a multiple of 64 -> (codes uint8 [n], tops int16 [n / 64]). NaN stays NaN."""
    bits = values.view(torch.int32)
    steps = ((bits & MAGNITUDE).clamp(max=NAN) + noise >> SHIFT).view(-1, CODE_BLOCK)
    top = steps.amax(1, keepdim=True) if len(steps) else steps[:, :1]
    codes = (steps - top + _largest(signed)).clamp(min=not signed) * (steps > 0)
    if signed:
        codes |= (bits < 0).view_as(codes) << 7
    return codes.to(torch.uint8).flatten(), top.to(torch.int16).flatten()


def encode_into(codes: Tensor, tops: Tensor, values: Tensor, noise: Tensor | int, *, signed: bool) -> None:
    """`encode`, into codes [n] and tops [n / 64] that are there already."""
    for out, part in zip((codes, tops), encode(values, noise, signed=signed), strict=True):
        out.copy_(part)


def decode(codes: Tensor, tops: Tensor, *, signed: bool) -> Tensor:
    """The fp32 [n] numbers that codes uint8 [n] and tops int16 [n / 64] stand for."""
    codes = codes.view(-1, CODE_BLOCK).int()
    steps = codes & 0x7F if signed else codes
    bits = (steps + tops.int()[:, None] - _largest(signed)) * (steps > 0) << SHIFT
    if signed:
        bits |= codes >> 7 << 31
    return bits.view(torch.float32).flatten()


def round_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 or fp64 [n] -> bf16 [n], up or down by the leading 16 of 20 bits of `noise`; bf16 values stay."""
    values = values.float()
    bits = torch.where(values.isnan(), torch.nan, values).view(torch.int32)
    return (bits + (noise >> (SHIFT - 16)) >> 16).to(torch.int16).view(torch.bfloat16)


def _largest(signed: bool) -> int:
    return 127 if signed else 255
