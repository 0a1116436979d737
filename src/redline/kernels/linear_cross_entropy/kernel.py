"""The Triton kernel between the GEMMs: loss of each token, and its logits overwritten by their gradient.

One program a row, two walks: statistics, then gradient. The second walk goes backwards, so that it starts
with what the first one left in the L2 cache (a row of 128k bf16 logits is 256 KB; with one program of 32
warps a multiprocessor, 34 MB of rows are in flight on an H200).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.common import on_device_of
from redline.kernels.launch import launchable
from redline.kernels.loss_spec import LossSpec
from redline.kernels.loss_triton import (
    label_logit,
    logit_gradient,
    row_statistics,
    row_tiles,
    token_and_weight,
)

MAX_WARPS = 32
CACHE = ("", "")  # eviction policies of the first and of the second read


@launchable
@triton.jit
def _loss_and_gradient_kernel(
    logits_ptr, labels_ptr, weights_ptr, grad_scale_ptr, loss_ptr, lse_ptr, row_stride, num_columns,
    vocab_size, label_share, other_share, z_loss,
    SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, WRITE_GRADIENT: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label, weight = token_and_weight(labels_ptr, weights_ptr, row, WEIGHTED)
    row_ptr = logits_ptr + row * row_stride
    COLUMNS: tl.constexpr = LANES * WIDTH // 2  # half of the first walk's tile: it needs more registers
    loss = 0.0
    lse = 0.0
    if weight != 0.0:
        target = label_logit(row_ptr, label, 0, vocab_size, vocab_size)
        peak, total, logit_sum = row_statistics(
            row_ptr, num_columns, vocab_size, SMOOTHED, LANES, WIDTH, FIRST
        )
        lse = peak + tl.log(total)
        loss = lse - label_share * target + z_loss * lse * lse
        if SMOOTHED:
            loss -= other_share * logit_sum
        loss *= weight
        if WRITE_GRADIENT:
            tl.debug_barrier()  # every thread has read the label's logit before any overwrites it
            scale = weight
            if SCALED:
                scale *= tl.load(grad_scale_ptr).to(tl.float32)
            num_tiles = tl.cdiv(num_columns, COLUMNS)
            for tile in range(0, num_tiles):
                column = (num_tiles - 1 - tile) * COLUMNS + tl.arange(0, COLUMNS)
                x = tl.load(
                    row_ptr + column, mask=column < num_columns, other=0.0, eviction_policy=SECOND
                ).to(tl.float32)
                grad = logit_gradient(
                    x, column, lse, scale, label, vocab_size, label_share, other_share, z_loss
                )
                grad = grad.to(logits_ptr.dtype.element_ty)
                tl.store(row_ptr + column, grad, mask=column < num_columns, cache_modifier=".cs")
    elif WRITE_GRADIENT:
        for start in range(0, num_columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            zero = tl.zeros([COLUMNS], logits_ptr.dtype.element_ty)
            tl.store(row_ptr + column, zero, mask=column < num_columns, cache_modifier=".cs")
    tl.store(loss_ptr + row, loss)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse)


def loss_and_gradient(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor | None, grad_scale: Tensor | None,
    loss_C: Tensor, lse_C: Tensor | None, spec: LossSpec, write_gradient: bool,
) -> None:  # fmt: skip
    """Fill loss_C, and lse_C where it is wanted (fp32).

    With `write_gradient` the logits are overwritten by grad_scale x d loss / d logits.
    """
    rows, columns = logits_CV.shape
    tiles = row_tiles(columns, logits_CV.dtype, MAX_WARPS)
    with on_device_of(logits_CV):
        _loss_and_gradient_kernel[(rows,)](
            logits_CV, labels_C, weights_C, grad_scale, loss_C, lse_C, logits_CV.stride(0), columns,
            spec.vocab_size, spec.label_share, spec.other_share, spec.z_loss,
            SMOOTHED=spec.label_smoothing != 0.0, WEIGHTED=weights_C is not None,
            SCALED=grad_scale is not None, WRITE_GRADIENT=write_gradient,
            LANES=tiles.lanes, WIDTH=tiles.width, FIRST=CACHE[0], SECOND=CACHE[1], num_warps=tiles.num_warps,
        )  # fmt: skip
