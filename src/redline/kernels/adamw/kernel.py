"""AdamW in Triton: one pass over the flat buffers, each element read and written once.

A thread takes 8 elements, which of four fp32 buffers are eight 16-byte loads in flight. The skip flag masks
the stores instead of ending the program early: a branch on it would hold the loads back by the latency of one
more. Root and division are the card's own, good to 1 and 2 ulp of an update that is lr times as small as the
parameter: correctly rounded they are a quarter of all instructions, and those are what limits the pass with
moments in 8 bits. Such moments are decoded and encoded on the way: the 8 elements of a thread lie in one
block, a row of the tile, and 8 threads find the largest of it among themselves. Those in bf16 are rounded by
the same noise.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.formulas.state import CODE_BLOCK
from redline.kernels.adamw.reference import BLOCK, ROUNDED
from redline.kernels.common import ceil_div, on_device_of
from redline.kernels.launch import launchable


@triton.jit
def _join(param, remainder):
    high = param.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _group_values(hyper_ptr, groups_ptr, segment):
    pair_ptr = hyper_ptr + 3 + 2 * tl.load(groups_ptr + segment)
    return tl.load(pair_ptr).to(tl.float32), tl.load(pair_ptr + 1).to(tl.float32)


@triton.jit
def _noise(p, hyper_ptr):
    word = p.to(tl.uint32, bitcast=True) ^ tl.load(hyper_ptr + 2).to(tl.int64).to(tl.uint32)
    word = tl.mul(word ^ (word >> 16), 0x85EBCA6B, sanitize_overflow=False)
    word = tl.mul(word ^ (word >> 13), 0xC2B2AE35, sanitize_overflow=False)
    return word ^ (word >> 16)


@triton.jit
def _load_moment(moment_ptr, top_ptr, index, block, end, SIGNED: tl.constexpr, PER: tl.constexpr):
    x = tl.load(moment_ptr + index, mask=index < end, other=0)
    if top_ptr is not None:  # codes.py says what they are
        LARGEST: tl.constexpr = 127 if SIGNED else 255
        code = x.to(tl.int32)
        steps = code & LARGEST
        top = tl.load(top_ptr + block, mask=block * PER < end, other=0).to(tl.int32)
        bits = tl.where(steps > 0, steps + (top - LARGEST), 0) << 20
        if SIGNED:
            bits |= (code >> 7) << 31
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _store_moment(moment_ptr, top_ptr, x, noise, index, block, end, SIGNED: tl.constexpr, PER: tl.constexpr):
    if top_ptr is not None:
        LARGEST: tl.constexpr = 127 if SIGNED else 255
        LEAST: tl.constexpr = 0 if SIGNED else 1
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000)
        steps = (size + noise.to(tl.int32)) >> 20
        top = tl.max(steps, axis=1, keep_dims=True)
        code = tl.where(steps > 0, tl.maximum(steps - (top - LARGEST), LEAST), 0)
        if SIGNED:
            code |= (bits >> 24) & 0x80
        tl.store(moment_ptr + index, code.to(tl.uint8), mask=index < end)
        tl.store(top_ptr + block, top.to(tl.int16), mask=block * PER < end)
    elif moment_ptr.dtype.element_ty == tl.bfloat16:
        bits = tl.where(x == x, x, float("nan")).to(tl.int32, bitcast=True) + (noise >> 4).to(tl.int32)
        rounded = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(moment_ptr + index, rounded, mask=index < end)
    else:
        tl.store(moment_ptr + index, x.to(moment_ptr.dtype.element_ty), mask=index < end)


@launchable
@triton.jit
def _adamw_kernel(
    param_ptr, main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_top_ptr, exp_avg_sq_top_ptr,
    hyper_ptr, grad_factor_ptr, found_inf_ptr, starts_ptr, groups_ptr, first_ptr, num_elements,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    REMAINDER: tl.constexpr, NOISY: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A pointer may be None. REMAINDER: main is one; NOISY: noise rounds a moment."""
    block_start = tl.program_id(0).to(tl.int64) * BLOCK
    block = tl.program_id(0).to(tl.int64) * (BLOCK // PER) + tl.arange(0, BLOCK // PER)[:, None]
    index = block * PER + tl.arange(0, PER)[None, :]
    mask = index < num_elements
    g = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
    m = _load_moment(exp_avg_ptr, exp_avg_top_ptr, index, block, num_elements, True, PER)
    v = _load_moment(exp_avg_sq_ptr, exp_avg_sq_top_ptr, index, block, num_elements, False, PER)
    if REMAINDER:
        p = _join(
            tl.load(param_ptr + index, mask=mask, other=0.0), tl.load(main_ptr + index, mask=mask, other=0)
        )
    elif main_ptr is not None:
        p = tl.load(main_ptr + index, mask=mask, other=0.0).to(tl.float32)
    else:
        p = tl.load(param_ptr + index, mask=mask, other=0.0).to(tl.float32)

    if starts_ptr is not None:
        segment = tl.load(first_ptr + tl.program_id(0))
        first_lr, first_decay = _group_values(hyper_ptr, groups_ptr, segment)
        lr = tl.zeros([BLOCK // PER, PER], tl.float32) + first_lr
        weight_decay = tl.zeros([BLOCK // PER, PER], tl.float32) + first_decay
        next_start = tl.load(starts_ptr + segment + 1)
        end = tl.minimum(block_start + BLOCK, num_elements)
        while next_start < end:
            segment += 1
            next_lr, next_decay = _group_values(hyper_ptr, groups_ptr, segment)
            lr = tl.where(index >= next_start, next_lr, lr)
            weight_decay = tl.where(index >= next_start, next_decay, weight_decay)
            next_start = tl.load(starts_ptr + segment + 1)
    else:
        lr = tl.load(hyper_ptr + 3).to(tl.float32)
        weight_decay = tl.load(hyper_ptr + 4).to(tl.float32)

    if grad_factor_ptr is not None:
        g *= tl.load(grad_factor_ptr).to(tl.float32)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    root = tl.sqrt(v * tl.load(hyper_ptr + 1).to(tl.float32))
    step = m * tl.load(hyper_ptr).to(tl.float32) / (root + eps)
    p -= lr * (step + weight_decay * p)

    end = num_elements
    if found_inf_ptr is not None:
        end = tl.where(tl.load(found_inf_ptr) == 0, num_elements, 0)
    mask = index < end
    noise = tl.zeros([BLOCK // PER, PER], tl.uint32)
    if NOISY:
        noise = _noise(p, hyper_ptr)
    _store_moment(exp_avg_ptr, exp_avg_top_ptr, m, noise & 0xFFFFF, index, block, end, True, PER)
    _store_moment(exp_avg_sq_ptr, exp_avg_sq_top_ptr, v, noise >> 12, index, block, end, False, PER)
    if REMAINDER:
        bits = tl.where(p == p, p, float("nan")).to(tl.int32, bitcast=True)
        high = (bits >> 16) + ((bits >> 15) & 1)
        tl.store(param_ptr + index, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(main_ptr + index, bits.to(tl.int16), mask=mask)
    else:
        tl.store(param_ptr + index, p.to(param_ptr.dtype.element_ty), mask=mask)
        if main_ptr is not None:
            tl.store(main_ptr + index, p.to(main_ptr.dtype.element_ty), mask=mask)


def step(
    param: Tensor, main: Tensor | None, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    exp_avg_top: Tensor | None, exp_avg_sq_top: Tensor | None, hyper: Tensor, grad_factor: Tensor | None,
    found_inf: Tensor | None, starts: Tensor | None, groups: Tensor | None, first: Tensor | None,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Launch over the whole buffer. A length that is a multiple of 16 keeps every load 16 bytes wide."""
    num_elements = param.numel()
    if num_elements == 0:
        return
    with on_device_of(param):
        _adamw_kernel[(ceil_div(num_elements, BLOCK),)](
            param, main, grad, exp_avg, exp_avg_sq, exp_avg_top, exp_avg_sq_top, hyper, grad_factor,
            found_inf, starts, groups, first, num_elements, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps,
            main is not None and main.dtype == torch.int16,
            exp_avg.dtype in ROUNDED or exp_avg_sq.dtype in ROUNDED,
            BLOCK if exp_avg_top is None and exp_avg_sq_top is None else CODE_BLOCK,
            BLOCK, num_warps=BLOCK // 256,
        )  # fmt: skip
