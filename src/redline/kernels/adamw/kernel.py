"""AdamW in Triton: one pass over the flat buffers, each element read and written once.

A thread takes 8 elements, which of four fp32 buffers are eight 16-byte loads in flight. The skip flag masks
the stores instead of ending the program early: a branch on it would hold the loads back by the latency of one
more. Root and division are the correctly rounded ones; the pass waits for memory, not for them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.adamw.reference import BLOCK
from redline.kernels.common import ceil_div, on_device_of
from redline.kernels.launch import launchable


@triton.jit
def _join(param, remainder):
    high = param.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _group_values(hyper_ptr, groups_ptr, segment):
    pair_ptr = hyper_ptr + 2 + 2 * tl.load(groups_ptr + segment)
    return tl.load(pair_ptr).to(tl.float32), tl.load(pair_ptr + 1).to(tl.float32)


@launchable
@triton.jit
def _adamw_kernel(
    param_ptr, main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, hyper_ptr, grad_factor_ptr, found_inf_ptr,
    starts_ptr, groups_ptr, first_ptr, num_elements, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    MAIN: tl.constexpr, REMAINDER: tl.constexpr, FACTOR: tl.constexpr, SKIPPABLE: tl.constexpr,
    SEGMENTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block_start = tl.program_id(0).to(tl.int64) * BLOCK
    index = block_start + tl.arange(0, BLOCK)
    mask = index < num_elements
    g = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg_ptr + index, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + index, mask=mask, other=0.0).to(tl.float32)
    if REMAINDER:
        p = _join(
            tl.load(param_ptr + index, mask=mask, other=0.0), tl.load(main_ptr + index, mask=mask, other=0)
        )
    elif MAIN:
        p = tl.load(main_ptr + index, mask=mask, other=0.0).to(tl.float32)
    else:
        p = tl.load(param_ptr + index, mask=mask, other=0.0).to(tl.float32)

    if SEGMENTED:
        segment = tl.load(first_ptr + tl.program_id(0))
        first_lr, first_decay = _group_values(hyper_ptr, groups_ptr, segment)
        lr = tl.zeros([BLOCK], tl.float32) + first_lr
        weight_decay = tl.zeros([BLOCK], tl.float32) + first_decay
        next_start = tl.load(starts_ptr + segment + 1)
        end = tl.minimum(block_start + BLOCK, num_elements)
        while next_start < end:
            segment += 1
            next_lr, next_decay = _group_values(hyper_ptr, groups_ptr, segment)
            lr = tl.where(index >= next_start, next_lr, lr)
            weight_decay = tl.where(index >= next_start, next_decay, weight_decay)
            next_start = tl.load(starts_ptr + segment + 1)
    else:
        lr = tl.load(hyper_ptr + 2).to(tl.float32)
        weight_decay = tl.load(hyper_ptr + 3).to(tl.float32)

    if FACTOR:
        g *= tl.load(grad_factor_ptr).to(tl.float32)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    root = tl.sqrt_rn(v * tl.load(hyper_ptr + 1).to(tl.float32))
    step = tl.div_rn(m * tl.load(hyper_ptr).to(tl.float32), root + eps)
    p -= lr * (step + weight_decay * p)

    if SKIPPABLE:
        mask = index < tl.where(tl.load(found_inf_ptr) == 0, num_elements, 0)
    tl.store(exp_avg_ptr + index, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + index, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    if REMAINDER:
        bits = tl.where(p == p, p, float("nan")).to(tl.int32, bitcast=True)
        high = (bits >> 16) + ((bits >> 15) & 1)
        tl.store(param_ptr + index, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(main_ptr + index, bits.to(tl.int16), mask=mask)
    else:
        tl.store(param_ptr + index, p.to(param_ptr.dtype.element_ty), mask=mask)
        if MAIN:
            tl.store(main_ptr + index, p.to(main_ptr.dtype.element_ty), mask=mask)


def step(
    param: Tensor, main: Tensor | None, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor,
    grad_factor: Tensor | None, found_inf: Tensor | None, starts: Tensor | None, groups: Tensor | None,
    first: Tensor | None, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Launch over the whole buffer. A length that is a multiple of 16 keeps every load 16 bytes wide."""
    num_elements = param.numel()
    if num_elements == 0:
        return
    with on_device_of(param):
        _adamw_kernel[(ceil_div(num_elements, BLOCK),)](
            param, main, grad, exp_avg, exp_avg_sq, hyper, grad_factor, found_inf, starts, groups, first,
            num_elements, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps,
            MAIN=main is not None, REMAINDER=main is not None and main.dtype == torch.int16,
            FACTOR=grad_factor is not None, SKIPPABLE=found_inf is not None, SEGMENTED=starts is not None,
            BLOCK=BLOCK, num_warps=BLOCK // 256,
        )  # fmt: skip
