"""fp8 with a scale for each block of a tensor, in plain PyTorch.

    scale = 2^k, the largest power of two with scale * (largest value of the block) <= the format's largest

A block is 1 x 128 values, or 1 x 32 (Open Compute's MX formats), along the dimension that a GEMM sums over;
of a weight it may be 128 x 128. Inverse scales are fp32 and lie as GEMMs on Hopper read them: of [M, K] in
tiles [K / block, M], of squares [M / 128, K / 128 padded to 4]. An infinity counts as fp32's largest number,
a NaN chooses no scale, and a block of zeros has 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.formulas.fp8_sizes import FP8_MULTIPLES
from redline.kernels.common import ceil_div
from redline.kernels.fp8.reference import FP8_MAX, quantize
from redline.units import round_up

SIDE = FP8_MULTIPLES["blockwise"]  # of a square block; rows are padded to a multiple of it
TOP: dict[torch.dtype, int] = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # the largest is 1.75 * 2^TOP
WIDEST = 126  # exponents beyond would make the scale or its inverse denormal
Blocks = tuple[Tensor, Tensor, Tensor, Tensor]


def padded_rows(rows: int) -> int:
    """Rows of a cast operand."""
    return round_up(rows, SIDE)


def padded_squares(cols: int) -> int:
    """Columns of the inverse scales of square blocks."""
    return round_up(ceil_div(cols, SIDE), 4)


def exponents(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 k of the scales 2^k for these largest values, by integer arithmetic: exact everywhere."""
    bits = largest.float().clamp(max=torch.finfo(torch.float32).max).view(torch.int32)
    too_wide = ((bits & 0x7FFFFF) > 0x600000).int()  # a mantissa above 1.75
    k = TOP[dtype] - ((bits >> 23) - 127) - too_wide
    return k.clamp(-WIDEST, WIDEST).masked_fill(bits == 0, 0)


def power(k: Tensor) -> Tensor:
    """2^k in fp32."""
    return ((k + 127) << 23).view(torch.float32)


def _tiles(x_MK: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor]:
    """(q [M, K], inverse scales [K / block, M])."""
    tiles = x_MK.float().unflatten(1, (-1, block))
    k = exponents(tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1), dtype)
    q = quantize(tiles, power(k)[..., None], dtype).flatten(1)
    return q, power(-k).T.contiguous()


def block_cast(x_TC: Tensor, dtype: torch.dtype, block: int, columns: bool) -> Blocks:
    """(q [T', C], inverse [C / block, T'], q^T [C, T'], inverse [T' / block, C]), T' = T padded with zeros.

    The transposed copy has other blocks, so it is quantized from x too. Without `columns` it is empty.
    """
    padding = padded_rows(len(x_TC)) - len(x_TC)
    x_TC = torch.nn.functional.pad(x_TC, (0, 0, 0, padding))
    rows = _tiles(x_TC, dtype, block)
    none = x_TC.new_empty(0, dtype=dtype), x_TC.new_empty(0, dtype=torch.float32)
    return *rows, *(_tiles(x_TC.T, dtype, block) if columns else none)


def square_cast(w_OI: Tensor, dtype: torch.dtype) -> Blocks:
    """(q [O, I], inverse [O / 128, I / 128 padded], q^T [I, O], inverse [I / 128, O / 128 padded])."""
    squares = w_OI.float().unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE))
    largest = squares.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax((1, 3))
    k = exponents(largest, dtype)
    q = quantize(squares, power(k)[:, None, :, None], dtype).flatten(2, 3).flatten(0, 1)
    return q, _padded(power(-k)), q.T.contiguous(), _padded(power(-k).T)


def _padded(inverse: Tensor) -> Tensor:
    cols = inverse.shape[1]
    return torch.nn.functional.pad(inverse, (0, round_up(cols, 4) - cols)).contiguous()


def restore(q_MK: Tensor, inverse: Tensor, block: int, square: bool) -> Tensor:
    """The fp32 values that a cast operand stands for."""
    rows, cols = q_MK.shape
    if square:
        scales = inverse[:, : cols // SIDE].repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
    else:
        scales = inverse.T.repeat_interleave(block, 1)
    return q_MK.float() * scales[:rows]


def block_gemm(
    a_MK: Tensor,
    b_NK: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    block: int,
    square: bool,
    dtype: torch.dtype,
) -> Tensor:
    """a b^T of the values that both stand for, summed in fp32; `square`: b has square blocks."""
    a, b = restore(a_MK, a_inverse, block, False), restore(b_NK, b_inverse, block, square)
    return (a @ b.T).to(dtype)


assert all(largest == 1.75 * 2.0 ** TOP[dtype] for dtype, largest in FP8_MAX.items())
