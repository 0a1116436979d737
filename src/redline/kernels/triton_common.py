"""What the kernel rooms share on Triton's side. Imported only by kernel.py files."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from redline.errors import ShapeError
from redline.kernels.common import ceil_div
from redline.kernels.launch import launchable

# exp(x) as exp2(x * LOG2_E) flushes what is denormal, which spares 3 of some 10 instructions an element.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def philox_words(k0, k1, iteration, sample, block):
    """The 4 words of Philox 4x32-10 for each block (layout: rng.py).

    Written out instead of tl.philox so that one wide multiplication gives both halves of a product: at the
    rate of memory, the multiplications are what limits a kernel that drops.
    """
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + sample.to(tl.uint32)
    c3 = tl.zeros_like(c0) + iteration
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _exponent(x, KIND: tl.constexpr):
    """e such that the activation is x / (1 + 2^e): silu, quick gelu, or gelu by tanh.

    (1 + tanh u) / 2 is the sigmoid of 2 u, and keeps its precision where tanh nears -1. At the rate of memory
    an element has time for about 25 instructions, so log2(e) is folded into the constants.
    """
    if KIND == "tanh":
        e = x * (-2.302208198 - 0.1029432397 * (x * x))
    elif KIND == "quick":
        e = x * -2.4554669596
    else:
        tl.static_assert(KIND == "silu")
        e = x * -1.4426950409
    return e


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1 / x for x >= 1. FAST: by NVIDIA's instruction alone, good to 1 ulp; a division scales x first."""
    if FAST:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def _normal(x, FAST: tl.constexpr):
    """P(N <= x) of a standard normal N, to 1e-6 of either tail up to |x| = 6, and e^(-x^2 / 2).

    In the manner of Abramowitz and Stegun 7.1.26: a tail is the density times a polynomial in
    1 / (1 + p |x|), here fitted by relative error, and 1/2 at 0. erf takes longer than memory does.
    """
    density = tl.exp2(x * (x * -0.7213475204))
    t = _reciprocal(1.0 + 0.294 * tl.abs(x), FAST)
    series = -0.0802413955 + t * (0.2710438844 - 0.0884757406 * t)
    tail = t * (0.1186071706 + t * (0.1022911007 + t * (0.1767749805 + t * series))) * density
    return tl.where(x < 0.0, tail, 1.0 - tail), density


@triton.jit
def activate(x, KIND: tl.constexpr, SHORT: tl.constexpr, FAST: tl.constexpr):
    """The activation `KIND` ("silu", "tanh" and "quick" gelu, "exact" gelu by erf, "relu2") in fp32.

    SHORT: the result is rounded to 16 bits or fewer, and need not be good to more. FAST: on NVIDIA's cards.
    """
    if KIND == "relu2":
        rest = tl.where(x < 0.0, 0.0, x)  # a comparison keeps a NaN
        y = rest * rest
    elif KIND == "exact" and SHORT:
        share, _ = _normal(x, FAST)
        y = x * share
    elif KIND == "exact":
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    else:
        y = x / (1.0 + tl.exp2(_exponent(x, KIND)))
    return y


@triton.jit
def activate_and_slope(x, KIND: tl.constexpr, SHORT: tl.constexpr, FAST: tl.constexpr):
    """The activation and its derivative, as `activate`."""
    if KIND == "relu2":
        rest = tl.where(x < 0.0, 0.0, x)
        y, slope = rest * rest, 2.0 * rest
    else:
        if KIND == "exact" and SHORT:
            share, density = _normal(x, FAST)
            steepness = 0.3989422804014327 * density
        elif KIND == "exact":
            share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
            steepness = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        else:
            share = _reciprocal(1.0 + tl.exp2(_exponent(x, KIND)), FAST)
            steepness = share - share * share  # one instruction
            if KIND == "tanh":
                steepness *= 1.5957691216057308 + 0.2140644488178008 * (x * x)
            if KIND == "quick":
                steepness *= 1.702
        y, slope = x * share, share + x * steepness
    return y, slope


@triton.jit
def whole_rows(ptr, row, stride, col, rows, cols):
    """Rows `row` [R] of all columns `col` [1, C] in their own dtype, 0 where there are none."""
    mask = (row < rows)[:, None] & (col < cols)
    return tl.load(ptr + (row * stride)[:, None] + col, mask=mask, other=0.0)


@triton.jit
def at_most(x, limit):
    """x, but no more than a limit that is not None; a NaN stays."""
    if limit is not None:
        x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def within(x, limit):
    """x between -limit and limit, where that is not None; a NaN stays."""
    if limit is not None:
        x = tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def beyond(x, limit):
    """Whether `within` changes x: its gradient is then 0."""
    return tl.abs(x) > limit


@triton.jit
def _column_sum(
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


@launchable
@triton.jit
def _column_sums_kernel(
    a_ptr, a_out_ptr, b_ptr, b_out_ptr, a_rows, b_rows, cols, row_stride,
    A_ACCUMULATE: tl.constexpr, B_ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _column_sum(a_ptr, a_out_ptr, a_rows, cols, row_stride, A_ACCUMULATE, BLOCK_ROWS, BLOCK_COLS)
    else:
        _column_sum(b_ptr, b_out_ptr, b_rows, cols, row_stride, B_ACCUMULATE, BLOCK_ROWS, BLOCK_COLS)


class Sum(NamedTuple):
    """out (+)= the sum over the rows of partial: [P, C] fp32 with strided rows -> [C]."""

    partial: Tensor
    out: Tensor
    accumulate: bool

    @classmethod
    def of(cls, partial: Tensor, grad: Tensor, main_grad: Tensor | None) -> Sum:
        """Into `grad`, or added to main_grad where there is one."""
        return cls(partial, grad, False) if main_grad is None else cls(partial, main_grad, True)


def column_sums(first: Sum, second: Sum | None = None) -> None:
    """One or two sums of as many columns and one row stride, in one launch and an order fixed by the shape.

    A program takes 16 columns, so that a hidden size of 4096 gives every SM two, and has up to 512 rows in
    flight at once: partial rows come from the L2 cache, and what costs is their latency.
    """
    for partial, out, _ in (first,) if second is None else (first, second):
        if out.shape != partial.shape[1:] or out.stride(0) != 1 or out.device != partial.device:
            raise ShapeError(
                f"a gradient buffer {tuple(out.shape)} on {out.device} does not fit {partial.shape[1]} sums.",
                "the kernel adds into it in place.",
                "give a main_grad that is one contiguous vector as long as the parameter, on its device.",
            )
    other = first if second is None else second
    (rows, cols), most = first.partial.shape, max(len(first.partial), len(other.partial))
    _column_sums_kernel[(ceil_div(cols, 16), 1 if second is None else 2)](
        first.partial, first.out, other.partial, other.out, rows, len(other.partial), cols,
        first.partial.stride(0), first.accumulate, other.accumulate, 64 if most <= 64 else 512, 16,
        num_warps=4 if most <= 64 else 8,
    )  # fmt: skip
