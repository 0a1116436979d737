"""Projection to the vocabulary and cross-entropy, without the whole logits.

The tokens are walked in chunks. Of each chunk: logits by a GEMM into one buffer that all chunks share; one
kernel that reads them, gives the loss and overwrites them by their gradient; two GEMMs that turn it into the
gradient of the hidden states and add it to that of the weight. So every gradient is made in forward, at
6 x T x H x V FLOPs together, and backward only hands it out.

Because the weight's gradient goes into `main_grad` before backward, what backward will bring must be known
in forward: it is 1, or `grad_scale` where one is given (the loss scale over the global token count, say),
and backward verifies that on the device. Without `main_grad` any upstream gradient is right.

Chunk size: as few chunks as 1 GiB of logits allows (4,096 tokens of 128,256 bf16 logits), since each chunk
reads and writes the whole main_grad; equal chunks, in multiples of the GEMMs' tile of 128 rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import RedlineError, ShapeError
from redline.formulas.loss_chunks import loss_chunk_tokens
from redline.kernels.common import (
    INTEGERS,
    Impl,
    accumulate_into,
    apply,
    lazily,
    operator,
    require,
    use_triton,
    why_not,
)
from redline.kernels.cross_entropy import VocabShard
from redline.kernels.linear_cross_entropy.products import HeadProducts
from redline.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from redline.kernels.linear_cross_entropy.sharded import launch_sharded
from redline.kernels.loss_spec import LossSpec, add_z_part, loss_spec


def supports(hidden_TH: Tensor, weight_VH: Tensor) -> str | None:
    """Why the chunked operator cannot take these tensors, or None."""
    if hidden_TH.dtype != weight_VH.dtype:
        return f"hidden states are {hidden_TH.dtype} and the weight is {weight_VH.dtype}"
    return why_not(hidden_TH, weight_VH)


def linear_cross_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    spec: LossSpec,
    weights_T: Tensor | None = None,
    *,
    main_grad: Tensor | None = None,
    grad_scale: Tensor | None = None,
    chunk_tokens: int | None = None,
    shard: VocabShard | None = None,
    products: HeadProducts | None = None,
    z_total: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Weighted sum of the tokens' losses.

    Args:
        hidden_TH: [T, H], bf16, fp16 or fp32 (fp64 by the reference).
        weight_VH: [>= vocab_size, H], the same dtype; rows from vocab_size on are padding.
        labels_T: [T] integers; a negative one marks a token that takes no part. Its hidden states must be
            finite all the same: the weight's gradient is a product with all of them, and 0 x inf is NaN.
        spec: vocabulary, label smoothing, z-loss (loss_spec.py has the formula).
        weights_T: [T], or None for 1; not differentiated. Weight 0: the token takes no part.
        main_grad: [as weight], fp32 or any float: receives the weight's gradient by addition, IN FORWARD when
            gradients are recorded; backward then returns none for the weight.
        grad_scale: 0-d, the upstream gradient that backward will bring; None for 1. The result is not scaled.
            Where it is 0, so are the gradients, and any other upstream gradient than 0 then gives NaN.
        chunk_tokens: tokens a chunk; None for the size argued above.
        shard: the rows of the head that this rank holds; the gradient of the hidden states is then this
            rank's part of a sum over the ranks. By the kernels only.
        z_total: 0-d, to which the z-loss part of the result is added, for the record.

    Returns: 0-d, fp32 (fp64 for fp64 input). Workspace: chunk_tokens x V logits, and without main_grad, where
        there is more than one chunk, a gradient of the weight in fp32.
    Raises: ShapeError on shapes that do not fit; ConfigError when impl="triton" cannot run; RuntimeError in
        backward (on a GPU: a device assertion) when main_grad was given and another gradient arrives.
    """
    _check(hidden_TH, weight_VH, labels_T, weights_T, spec, main_grad, shard)
    if not use_triton("linear_cross_entropy", impl, supports(hidden_TH, weight_VH)):
        alone = shard is None and products is None
        require(alone, "linear_cross_entropy: shares and products of the head are taken by the kernels only.")
        weight_VH = accumulate_into(weight_VH, main_grad)
        return linear_cross_entropy_reference(hidden_TH, weight_VH, labels_T, spec, weights_T, z_total)
    record = torch.is_grad_enabled()
    needs_hidden, needs_weight = record and hidden_TH.requires_grad, record and weight_VH.requires_grad
    if chunk_tokens is None:
        columns = spec.vocab_size if shard is None else shard.size
        chunk_tokens = loss_chunk_tokens(hidden_TH.shape[0], columns, hidden_TH.itemsize)
    elif chunk_tokens < 1:
        raise ShapeError(
            f"linear_cross_entropy: chunk_tokens={chunk_tokens} leaves no token to a chunk.",
            why="the tokens are walked in chunks of at least one.",
            mend="pass a positive number, or None for the size that fits.",
        )
    given = labels_T, weights_T, main_grad if needs_weight else None, grad_scale, z_total
    form = *spec.as_args, chunk_tokens, needs_hidden, needs_weight and main_grad is None
    loss: Tensor = apply(LinearCrossEntropyFn, hidden_TH, weight_VH, given, form, (shard, products))
    return loss


def _check(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, weights_T: Tensor | None,
    spec: LossSpec, main_grad: Tensor | None, shard: VocabShard | None,
) -> None:  # fmt: skip
    shape_TH, shape_VH, shape_T = hidden_TH.shape, weight_VH.shape, labels_T.shape
    if not (len(shape_TH) == len(shape_VH) == 2 and shape_TH[1] == shape_VH[1]):
        raise ShapeError(
            "linear_cross_entropy takes hidden states [T, H] and a weight [V, H] of the same H.",
            why=f"they are {list(shape_TH)} and {list(shape_VH)}.",
            mend="flatten the hidden states over the tokens.",
        )
    if shape_T != (shape_TH[0],) or labels_T.dtype not in INTEGERS:
        raise ShapeError(
            "linear_cross_entropy takes one label a token, an integer.",
            why=f"labels are {list(shape_T)} of {labels_T.dtype}, hidden states {list(shape_TH)}.",
            mend="flatten the labels over the tokens; a negative one marks a token without a part.",
        )
    if weights_T is not None and weights_T.shape != shape_T:
        raise ShapeError(
            "linear_cross_entropy takes one weight a token.",
            why=f"weights are {list(weights_T.shape)}, labels {list(shape_T)}.",
            mend="flatten the weights over the tokens, or pass None for 1.",
        )
    if shard is None:
        if shape_VH[0] < spec.vocab_size:
            raise ShapeError(
                "linear_cross_entropy: the weight has fewer rows than the vocabulary has entries.",
                why=f"there are {shape_VH[0]} rows for {spec.vocab_size} entries.",
                mend="pass the whole weight, or say with a VocabShard which rows these are.",
            )
    elif shape_VH[0] != shard.size:
        raise ShapeError(
            "linear_cross_entropy: the weight is not this rank's shard of the vocabulary.",
            why=f"it has {shape_VH[0]} rows, the shard {shard.size}: whole weights would count once a rank.",
            mend="pass the rank's own rows, or the whole weight without a shard.",
        )
    if main_grad is not None and main_grad.shape != shape_VH:
        raise ShapeError(
            "linear_cross_entropy: main_grad and the weight differ in shape.",
            why=f"main_grad is {list(main_grad.shape)}, the weight {list(shape_VH)}.",
            mend="pass a main_grad of the weight's shape, padding included.",
        )


def _fake(
    hidden: Tensor, weight: Tensor, labels: Tensor, weights: Any, dweight: Any, grad_scale: Any, lse: Any,
    vocab_size: int, smoothing: float, z_loss: float, chunk_tokens: int, needs_hidden: bool, fresh: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss_T = hidden.new_empty(len(hidden), dtype=torch.float32)
    return loss_T, hidden.new_empty(hidden.shape if needs_hidden else 0)


_launch = lazily("redline.kernels.linear_cross_entropy.whole", "launch")
_forward = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, Tensor? weights,"
    " Tensor(a!)? dweight, Tensor? grad_scale, Tensor(b!)? lse, int vocab_size, float smoothing,"
    " float z_loss, int chunk_tokens, bool needs_hidden, bool fresh) -> (Tensor, Tensor)",
    _launch,
    _fake,
)


# Labels, weights, main_grad, grad_scale and z_total.
Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class LinearCrossEntropyFn(torch.autograd.Function):
    """Gradients are made in forward and saved, or added to main_grad; backward hands them out, once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, given: Given,
        form: tuple[int, float, float, int, bool, bool], head: tuple[VocabShard | None, HeadProducts | None],
    ) -> Tensor:  # fmt: skip
        """What is not differentiated comes in tuples: every argument costs the host time.

        `form` is the spec's `as_args`, the tokens of a chunk, whether hidden needs a gradient, and whether
        the weight needs one of its own, for want of main_grad.
        """
        labels, weights, main_grad, grad_scale, z_total = given
        shard, products = head
        dweight = main_grad
        if form[5]:
            one_chunk = hidden.shape[0] <= form[3]
            dweight = torch.empty_like(weight, dtype=weight.dtype if one_chunk else torch.float32)
        lse_T = None if z_total is None else hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        tensors = hidden, weight, labels, weights, dweight, grad_scale, lse_T
        if shard is not None:
            loss_T, dhidden = launch_sharded(*tensors, loss_spec(*form[:3]), shard, *form[3:], products)
        elif products is not None:
            loss_T, dhidden = _launch(*tensors, *form, products)
        else:
            loss_T, dhidden = _forward(*tensors, *form)
        if z_total is not None and lse_T is not None:
            add_z_part(z_total, lse_T, weights, form[2])
        own = dweight.to(weight.dtype) if form[5] and dweight is not None else None
        ctx.save_for_backward(dhidden, own, grad_scale)
        ctx.in_main_grad, ctx.spent = main_grad is not None, False
        total: Tensor = loss_T.sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RedlineError(
                "linear_cross_entropy: a second backward.",
                why="its gradients were made once, in forward, and have been handed out.",
                mend="run forward again.",
            )
        ctx.spent = True
        dhidden, dweight, grad_scale = ctx.saved_tensors
        if ctx.in_main_grad:
            expected = 1.0 if grad_scale is None else grad_scale.to(upstream.dtype)
            torch._assert_async(
                torch.eq(upstream, expected),
                "linear_cross_entropy: backward brought another gradient than the one that main_grad was made"
                " with; hand the factor of the loss to the operator as grad_scale.",
            )
        else:
            factor = upstream
            if grad_scale is not None:  # 0 by 0 is 0 here
                factor = (upstream / grad_scale).masked_fill(upstream == 0, 0.0)
            dhidden, dweight = dhidden.mul_(factor), None if dweight is None else dweight.mul_(factor)
        return dhidden if ctx.needs_input_grad[0] else None, dweight, None, None, None
