"""What the kernel rooms share on Triton's side. Imported only by kernel.py files."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from redline.errors import ShapeError
from redline.kernels.common import ceil_div


@triton.jit
def _exponent(x, KIND: tl.constexpr):
    """e such that the activation is x / (1 + 2^e): silu, quick gelu, or gelu by tanh.

    (1 + tanh u) / 2 is the sigmoid of 2 u, and keeps its precision where tanh nears -1. At the rate of memory
    an element has time for about 25 instructions, so log2(e) is folded into the constants.
    """
    if KIND == "tanh":
        e = x * (-2.302208198 - 0.1029432397 * x * x)
    elif KIND == "quick":
        e = x * -2.4554669596
    else:
        tl.static_assert(KIND == "silu")
        e = x * -1.4426950409
    return e


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation `KIND` ("silu", "tanh" and "quick" gelu, or "exact" gelu by erf) in fp32."""
    if KIND == "exact":
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    else:
        y = x / (1.0 + tl.exp2(_exponent(x, KIND)))
    return y


@triton.jit
def activate_and_slope(x, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == "exact":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        steepness = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        share = 1.0 / (1.0 + tl.exp2(_exponent(x, KIND)))
        steepness = share * (1.0 - share)
        if KIND == "tanh":
            steepness *= 1.5957691216057308 + 0.2140644488178008 * x * x
        if KIND == "quick":
            steepness *= 1.702
    return x * share, share + x * steepness


@triton.jit
def _column_sum_kernel(
    partial_ptr, out_ptr, rows, cols, row_stride,
    ACCUMULATE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        acc += tl.load(partial_ptr + (row * row_stride)[:, None] + col[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, axis=0)
    if ACCUMULATE:
        total += tl.load(out_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)


def column_sum(partial: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (+)= sum over rows of partial, in an order fixed by the shape. [P, C] fp32, rows strided -> [C]."""
    rows, cols = partial.shape
    if out.shape != (cols,) or out.stride(0) != 1 or out.device != partial.device:
        raise ShapeError(
            f"a gradient buffer {tuple(out.shape)} on {out.device} does not fit {cols} parameters.",
            "the kernel adds into it in place.",
            "give a main_grad that is one contiguous vector as long as the parameter, on its device.",
        )
    _column_sum_kernel[(ceil_div(cols, 32),)](
        partial,
        out,
        rows,
        cols,
        partial.stride(0),
        ACCUMULATE=accumulate,
        BLOCK_ROWS=64,
        BLOCK_COLS=32,
        num_warps=4,
    )
