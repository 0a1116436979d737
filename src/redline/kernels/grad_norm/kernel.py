"""Gradient statistics in Triton: partial results of fixed pieces, then one program that adds them in order.

A piece is 256 KiB whatever the device, so the result is the same on every run and every GPU. Squares are
added in fp64: those of an fp32 element are exact there and never overflow.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import ceil_div, on_device_of
from redline.kernels.launch import launchable

PIECE_BYTES = 1 << 18
LANES, WARPS = 1024, 8  # a lane is one 16-byte load, so a thread has four in flight


@launchable
@triton.jit
def _piece_kernel(
    grad_ptr, partial_ptr, num_elements, first_piece, num_pieces,
    PIECE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    piece_start = tl.program_id(0).to(tl.int64) * PIECE
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    squares = tl.zeros([LANES], tl.float64)
    nonfinite = tl.zeros([LANES], tl.int32)
    nonzero = tl.zeros([LANES], tl.int32)
    end = tl.minimum(piece_start + PIECE, num_elements)
    index = piece_start + tile
    ahead = tl.load(grad_ptr + index, mask=index < end, other=0.0)
    for _ in range(0, PIECE, LANES * WIDTH):
        x = ahead.to(tl.float32)
        index += LANES * WIDTH  # the next tile is on its way while this one is summed
        ahead = tl.load(grad_ptr + index, mask=index < end, other=0.0)
        wide = x.to(tl.float64)
        squares += tl.sum(wide * wide, axis=1)
        nonfinite += tl.sum((x - x != 0.0).to(tl.int32), axis=1)  # NaN and Inf less themselves are NaN
        nonzero += tl.sum((x != 0.0).to(tl.int32), axis=1)
    out_ptr = partial_ptr + first_piece + tl.program_id(0)
    tl.store(out_ptr, tl.sum(squares, axis=0))
    tl.store(out_ptr + num_pieces, tl.sum(nonfinite, axis=0).to(tl.float64))
    tl.store(out_ptr + 2 * num_pieces, tl.sum(nonzero, axis=0).to(tl.float64))


@launchable
@triton.jit
def _total_kernel(partial_ptr, out_ptr, num_pieces, BLOCK: tl.constexpr):
    row_ptr = partial_ptr + tl.program_id(0) * num_pieces
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_pieces, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(row_ptr + index, mask=index < num_pieces, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def statistics(grads: Sequence[Tensor]) -> Tensor:
    """float64 [3] of contiguous tensors on one device."""
    pieces = [ceil_div(grad.numel() * grad.itemsize, PIECE_BYTES) for grad in grads]
    num_pieces = sum(pieces)
    out = torch.empty(3, dtype=torch.float64, device=grads[0].device)
    partial = torch.empty((3, num_pieces), dtype=torch.float64, device=out.device)
    first = 0
    with on_device_of(out):
        for grad, count in zip(grads, pieces, strict=True):
            if count:
                _piece_kernel[(count,)](
                    grad, partial, grad.numel(), first, num_pieces,
                    PIECE=PIECE_BYTES // grad.itemsize, LANES=LANES, WIDTH=16 // grad.itemsize,
                    num_warps=WARPS,
                )  # fmt: skip
            first += count
        _total_kernel[(3,)](partial, out, num_pieces, BLOCK=2048, num_warps=8)
    return out
