"""Scale + mask + softmax as an operator: support, autograd, the choice of kernel or reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import ShapeError
from redline.kernels.common import INTEGERS, Impl, apply, lazily, operator, use_triton, why_not
from redline.kernels.masked_softmax.reference import masked_softmax_reference

MAX_COLS = 32768  # one row is held by one program


def supports(scores_BNSK: Tensor) -> str | None:
    """Why the kernel cannot take these scores, or None."""
    if scores_BNSK.shape[-1] > MAX_COLS:
        return f"a row of {scores_BNSK.shape[-1]} keys is longer than the kernel's {MAX_COLS}"
    return why_not(scores_BNSK)


def _forward_fake(
    x: Tensor, scale: float, causal: bool, mask: Tensor | None, lengths: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape)


def _backward_fake(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    return y.new_empty(y.shape)


_KERNEL = "redline.kernels.masked_softmax.kernel"
_forward = operator(
    "masked_softmax_fwd(Tensor x, float scale, bool causal, Tensor? mask, Tensor? lengths) -> Tensor",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_backward = operator(
    "masked_softmax_bwd(Tensor dy, Tensor y, float scale, bool causal) -> Tensor",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


class MaskedSoftmaxFn(torch.autograd.Function):
    """Saves the result only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, causal: bool, mask: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        y: Tensor = _forward(x, scale, causal, mask, lengths)
        ctx.save_for_backward(y)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return _backward(dy, y, ctx.scale, ctx.causal), None, None, None, None


def masked_softmax(
    scores_BNSK: Tensor,
    scale: float = 1.0,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    lengths_B: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """softmax over K of scale * scores without the masked positions; a row with nothing left is 0.

    Shapes: scores [B, N, S, K] of any strides (copied where rows have none in common), bf16, fp16, fp32 (fp64
        by the reference) -> the same, in their dtype.
    Args:
        causal: query i sees keys up to i + K - S.
        mask: bool, broadcastable to scores; True = masked out.
        lengths_B: integers [B]; keys from there on are padding. All three may be combined.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when the shapes do not fit, ConfigError when impl="triton" cannot run.
    """
    shape = scores_BNSK.shape
    if len(shape) != 4:
        raise ShapeError(f"masked_softmax: scores {tuple(shape)} are not [B, N, S, K].")
    if mask is not None:
        fits = mask.dim() <= 4 and all(
            have in (1, want) for have, want in zip(reversed(mask.shape), reversed(shape), strict=False)
        )
        if not (fits and mask.dtype == torch.bool and mask.device == scores_BNSK.device):
            raise ShapeError(
                f"masked_softmax: mask {tuple(mask.shape)} {mask.dtype} does not fit scores {tuple(shape)}.",
                "it is a bool tensor on their device that broadcasts to them.",
            )
    if lengths_B is not None and not (
        lengths_B.shape == shape[:1]
        and lengths_B.dtype in INTEGERS
        and lengths_B.is_contiguous()
        and lengths_B.device == scores_BNSK.device
    ):
        raise ShapeError(
            f"masked_softmax: lengths {tuple(lengths_B.shape)} do not fit scores {tuple(shape)}.",
            "they are contiguous integers [B] on the device of the scores.",
        )
    if use_triton("masked_softmax", impl, supports(scores_BNSK)):
        y: Tensor = apply(MaskedSoftmaxFn, scores_BNSK, scale, causal, mask, lengths_B)
        return y
    return masked_softmax_reference(scores_BNSK, scale, causal, mask, lengths_B)
