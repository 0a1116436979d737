"""Casts and GEMMs of fp8 by blocks; `kernel` chooses the Triton kernel, `emulate` the plain GEMM."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from redline.kernels.common import ceil_div, lazily
from redline.kernels.fp8 import block_reference
from redline.kernels.fp8.block_reference import SIDE, Blocks

_block_cast_kernel = lazily("redline.kernels.fp8.block_kernel", "block_cast")
_square_cast_kernel = lazily("redline.kernels.fp8.block_kernel", "square_cast")


def block_cast(x: Tensor, dtype: torch.dtype, block: int, columns: bool, kernel: bool) -> Blocks:
    """x [T, C] in blocks of 1 x `block` along C and, with `columns`, along T: see block_reference."""
    run = _block_cast_kernel if kernel else block_reference.block_cast
    found: Blocks = run(x, dtype, block, columns)
    return found


def square_cast(w: Tensor, dtype: torch.dtype, kernel: bool) -> Blocks:
    """A weight [O, I] in blocks of 128 x 128, and its transpose; both sizes are multiples of 128."""
    found: Blocks = (_square_cast_kernel if kernel else block_reference.square_cast)(w, dtype)
    return found


def block_gemm(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    block: int,
    square: bool,
    dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    """a b^T: [M, K], [N, K] -> [M, N] in `dtype`, sums in fp32.

    Blocks of 128 need Hopper with CUDA 12.9, blocks of 32 Blackwell.
    """
    if emulate or not a.is_cuda:
        return block_reference.block_gemm(a, b, a_inverse, b_inverse, block, square, dtype)
    if block == SIDE:
        tile = ScalingType.BlockWise1x128
        other = ScalingType.BlockWise128x128 if square else tile
        return scaled_mm(a, b.T, a_inverse.T, tile, b_inverse.T, other, output_dtype=dtype)
    tile, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    scales = (swizzled(each) for each in (a_inverse, b_inverse))
    return scaled_mm(a, b.T, next(scales), tile, next(scales), tile, swizzle, swizzle, output_dtype=dtype)


def swizzled(inverse: Tensor) -> Tensor:
    """Powers of two [K / 32, M] as bytes of exponents, as Blackwell's tensor cores read them.

    Tiles of 128 rows and 4 blocks follow one another; row 32 a + b and block c stand at 16 b + 4 a + c.
    """
    exponents_MK = (inverse.view(torch.int32) >> 23).to(torch.uint8).T
    M, K = exponents_MK.shape
    padding = (0, ceil_div(K, 4) * 4 - K, 0, ceil_div(M, SIDE) * SIDE - M)
    whole = torch.nn.functional.pad(exponents_MK, padding)
    tiles = whole.view(whole.shape[0] // SIDE, 4, 32, whole.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)
