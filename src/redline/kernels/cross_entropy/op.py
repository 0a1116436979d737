"""Cross-entropy of each token over the true vocabulary; also over a vocabulary split between ranks.

    cross_entropy(logits_TV, labels_T, LossSpec(vocab_size=V)) -> loss_T

The logits may be wider than the vocabulary: padded columns take no part and get gradient 0. The gradient
is made in backward from the saved logits and one log-sum-exp a token; with `inplace_grad` it overwrites
the logits.

With a `VocabShard` each rank holds some columns. Forward is then three phases: statistics of the local
columns, one MAX and one SUM over the ranks (the collectives are handed in), loss; backward needs no
communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.errors import RedlineError
from redline.kernels.common import (
    INTEGERS,
    Impl,
    apply,
    as_rows,
    lazily,
    operator,
    require,
    use_triton,
    why_not,
)
from redline.kernels.cross_entropy.reference import (
    cross_entropy_reference,
    gradient_reference,
    statistics_reference,
)
from redline.kernels.loss_spec import LossSpec, add_z_part, takes_part

AllReduce = Callable[[Tensor, Literal["max", "sum"]], Tensor]


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The columns that this rank holds: [start, start + size) of the padded, global vocabulary.

    `all_reduce(tensor, "max" | "sum")` returns the tensor reduced over the ranks that hold the other columns.
    """

    start: int
    size: int
    all_reduce: AllReduce


def supports(logits_TV: Tensor) -> str | None:
    """Why the Triton kernels cannot take these logits, or None."""
    return why_not(logits_TV)


def cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    spec: LossSpec,
    weights_T: Tensor | None = None,
    *,
    shard: VocabShard | None = None,
    inplace_grad: bool = False,
    z_total: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Weighted loss of each token.

    Args:
        logits_TV: [T, >= vocab_size], or [T, shard.size]; bf16, fp16 or fp32 (fp64 by the reference).
        labels_T: [T] integers; a negative one marks a token that takes no part.
        spec: vocabulary, label smoothing, z-loss (loss_spec.py has the formula).
        weights_T: [T], or None for 1; not differentiated. Weight 0: the token takes no part.
        inplace_grad: let backward overwrite the logits with their gradient. They must not be read after
            backward, and a second backward is refused.
        z_total: 0-d, to which the z-loss part of the losses is added, for the record.

    Returns: loss_T [T], fp32 (fp64 for fp64 logits); exactly 0, with gradient 0, where a token takes no part.
    Raises: ShapeError on shapes that do not fit; ConfigError when impl="triton" cannot run.
    """
    _check(logits_TV, labels_T, weights_T, spec, shard)
    fused = use_triton("cross_entropy", impl, supports(logits_TV))
    if inplace_grad and logits_TV.requires_grad and logits_TV.is_leaf:
        raise RedlineError(
            "cross_entropy: inplace_grad on logits that are a leaf.",
            why="their gradient would replace the values that the caller owns.",
            mend="hand in computed logits, or leave inplace_grad off.",
        )
    if shard is not None:
        loss_T: Tensor = apply(
            ShardedCrossEntropyFn, logits_TV, labels_T, weights_T, spec, shard, inplace_grad, fused, z_total
        )
    elif fused:
        loss_T = apply(CrossEntropyFn, logits_TV, labels_T, weights_T, spec.as_args, inplace_grad, z_total)
    else:
        loss_T = cross_entropy_reference(logits_TV, labels_T, spec, weights_T, z_total)
    return loss_T


def _check(
    logits_TV: Tensor, labels_T: Tensor, weights_T: Tensor | None, spec: LossSpec, shard: VocabShard | None
) -> None:
    shape_TV, shape_T = logits_TV.shape, labels_T.shape
    require(
        len(shape_TV) == 2 and shape_T == (shape_TV[0],),
        "cross_entropy takes logits [T, V] and labels [T] of the same T.",
        mend="flatten both over the tokens.",
    )
    require(
        labels_T.dtype in INTEGERS,
        "cross_entropy takes labels that are integers.",
        why="a label is a column of the logits; a negative one marks a token without a part.",
        mend="convert them to int64.",
    )
    require(
        weights_T is None or weights_T.shape == shape_T,
        "cross_entropy takes one weight a token.",
    )
    if shard is not None:
        require(
            shape_TV[1] == shard.size,
            "cross_entropy: the logits are not this rank's shard of the vocabulary.",
            why="whole logits handed to the sharded loss would count every entry once a rank.",
            mend="pass the rank's own columns, or whole logits without a shard.",
        )
    else:
        require(
            shape_TV[1] >= spec.vocab_size,
            "cross_entropy: the logits have fewer columns than the vocabulary has entries.",
            mend="pass the whole logits, or say with a VocabShard which columns these are.",
        )


def _fake_loss(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    return loss, torch.empty_like(loss)


_KERNEL = "redline.kernels.cross_entropy.kernel"
_TOKENS = "Tensor labels, Tensor? weights"
_SPEC = "int vocab_size, float smoothing, float z_loss"
_SAVED = f"{_TOKENS}, Tensor lse, Tensor upstream, int vocab_start, {_SPEC}"
_loss = operator(
    f"cross_entropy_loss(Tensor logits, {_TOKENS}, {_SPEC}) -> (Tensor, Tensor)",
    lazily(_KERNEL, "loss"),
    _fake_loss,
)
_statistics = operator(
    f"cross_entropy_statistics(Tensor logits, {_TOKENS}, int vocab_start, {_SPEC}) -> Tensor",
    lazily(_KERNEL, "statistics"),
    lambda logits, *_: logits.new_empty(4, len(logits), dtype=torch.float32),
)
_gradient = operator(
    f"cross_entropy_grad(Tensor logits, {_SAVED}) -> Tensor",
    lazily(_KERNEL, "gradient"),
    lambda logits, *_: logits.new_empty(logits.shape),
)
_gradient_ = operator(
    f"cross_entropy_grad_(Tensor(a!) logits, {_SAVED}) -> ()",
    lazily(_KERNEL, "gradient_"),
    lambda *_: None,
)


def _refuse_second_backward(ctx: Any) -> None:
    if ctx.spent:
        raise RedlineError(
            "cross_entropy: a second backward through an in-place gradient.",
            why="the first one overwrote the logits with their gradient.",
            mend="pass inplace_grad=False to go through the graph twice.",
        )
    ctx.spent = ctx.inplace


def _fused_gradient(ctx: Any, upstream: Tensor, vocab_start: int) -> Tensor:
    """The gradient of the saved logits by the kernel; in their place, once, where that was asked for."""
    _refuse_second_backward(ctx)
    logits, *rest = ctx.saved_tensors
    grad: Tensor = logits
    if ctx.inplace:
        _gradient_(logits, *rest, upstream, vocab_start, *ctx.spec)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(logits)  # whoever else saved these logits must notice
    else:
        grad = _gradient(logits, *rest, upstream, vocab_start, *ctx.spec)
    return grad


class CrossEntropyFn(torch.autograd.Function):
    """The whole vocabulary on one rank, by the kernels."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None,
        spec: tuple[int, float, float], inplace: bool, z_total: Tensor | None,
    ) -> Tensor:  # fmt: skip
        logits, labels = as_rows(logits), labels.contiguous()
        weights = None if weights is None else weights.contiguous()
        outputs: tuple[Tensor, Tensor] = _loss(logits, labels, weights, *spec)
        ctx.save_for_backward(logits, labels, weights, outputs[1])
        ctx.spec, ctx.inplace, ctx.spent = spec, inplace, False
        if z_total is not None:
            add_z_part(z_total, outputs[1], weights, spec[2])
        return outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _fused_gradient(ctx, upstream, 0), None, None, None, None, None


class ShardedCrossEntropyFn(torch.autograd.Function):
    """A rank's columns of the vocabulary: local statistics, collectives, loss; gradient of those columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None,
        spec: LossSpec, shard: VocabShard, inplace: bool, fused: bool, z_total: Tensor | None,
    ) -> Tensor:  # fmt: skip
        logits, labels = as_rows(logits), labels.contiguous()
        weights = None if weights is None else weights.contiguous()
        if fused:
            stats_4T = _statistics(logits, labels, weights, shard.start, *spec.as_args)
        else:
            stats_4T = statistics_reference(logits, labels, weights, spec, shard.start)
        loss, lse = combine_shards(stats_4T, labels, weights, spec, shard.all_reduce)
        add_z_part(z_total, lse, weights, spec.z_loss)
        ctx.save_for_backward(logits, labels, weights, lse)
        ctx.spec, ctx.start, ctx.fused = spec.as_args, shard.start, fused
        ctx.inplace, ctx.spent = inplace and fused, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.fused:
            grad = _fused_gradient(ctx, upstream, ctx.start)
        else:
            logits, labels, weights, lse = ctx.saved_tensors
            spec = LossSpec(*ctx.spec)
            grad = gradient_reference(logits, labels, weights, lse, upstream, spec, ctx.start)
        return grad, *(None,) * 7


def combine_shards(
    stats_4T: Tensor, labels_T: Tensor, weights_T: Tensor | None, spec: LossSpec, all_reduce: AllReduce
) -> tuple[Tensor, Tensor]:
    """(loss_T, lse_T) from the shards' statistics: one MAX of T and one SUM of 3 x T elements."""
    local_peak_T = stats_4T[0]
    peak_T = all_reduce(local_peak_T.clone(), "max")
    peak_T = torch.where(peak_T.isneginf(), 0.0, peak_T)
    stats_4T[1] *= (local_peak_T - peak_T).exp()
    total_T, label_logit_T, sum_T = all_reduce(stats_4T[1:].contiguous(), "sum").unbind(0)
    active_T = takes_part(labels_T, weights_T)
    lse_T = torch.where(active_T, peak_T + total_T.log(), 0.0)
    loss_T = (
        lse_T + spec.z_loss * lse_T.square() - spec.label_share * label_logit_T - spec.other_share * sum_T
    )
    if weights_T is not None:
        loss_T = loss_T * weights_T
    return torch.where(active_T, loss_T, 0.0), lse_T
