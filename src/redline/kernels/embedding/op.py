"""Embedding lookup whose gradient goes straight into main_grad.

    embedding(tokens, weight, main_grad=weight.main_grad) -> [*tokens.shape, H]

Backward touches only the rows that were looked up, in fp32: there is no dense gradient in the weight's dtype,
rows of the padded vocabulary stay as they are, and the order of the sum is fixed. Without main_grad the
weight gets an ordinary dense gradient, summed the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.kernels.common import (
    INTEGERS,
    Impl,
    accumulate_into,
    apply,
    as_rows,
    lazily,
    operator,
    require,
    use_triton,
    why_not,
)
from redline.kernels.embedding.reference import embedding_reference


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions to add: ids of the tokens' shape, weight [P, H], and where its gradient goes."""

    ids: Tensor
    weight: Tensor
    main_grad: Tensor | None = None


def supports(weight_VH: Tensor, positions: Positions | None = None) -> str | None:
    """Why the kernels cannot look up in this weight, or None."""
    return why_not(weight_VH, None if positions is None else positions.weight)


def embedding(
    tokens: Tensor,
    weight_VH: Tensor,
    *,
    main_grad: Tensor | None = None,
    positions: Positions | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Word embedding of each token, plus its position's where given.

    Args:
        tokens: integers of any shape; one outside [0, vocab_size) gives a NaN row: loud, without a wait for
            the device.
        weight_VH: [V, H], bf16, fp16 or fp32 (fp64 by the reference).
        main_grad: [V, H] contiguous, any float dtype: receives the gradient by addition in backward,
            which then returns none for the weight.
        positions: added in fp32 before the one rounding; only where all rows are here.
        vocab_start: first id of this weight's rows, where they are one rank's share of the vocabulary;
            ids that another rank holds give zeros, to be summed over the ranks.
        vocab_size: of the whole, true vocabulary; None for the weight's number of rows.

    Returns: [*tokens.shape, H] in the weight's dtype, contiguous.
    Raises: ShapeError on shapes that do not fit; ConfigError when impl="triton" cannot run.
    """
    vocab_size = weight_VH.shape[0] if vocab_size is None else vocab_size
    _check(weight_VH, main_grad, tokens, positions, vocab_start, vocab_size)
    ids, position_weight, position_main_grad = None, None, None
    if positions is not None:
        ids, position_weight, position_main_grad = positions.ids, positions.weight, positions.main_grad
    if use_triton("embedding", impl, supports(weight_VH, positions)):
        out: Tensor = apply(
            EmbeddingFn,
            tokens,
            weight_VH,
            main_grad,
            ids,
            position_weight,
            position_main_grad,
            vocab_start,
            vocab_size,
        )
        return out
    if position_weight is not None:
        position_weight = accumulate_into(position_weight, position_main_grad)
    weight_VH = accumulate_into(weight_VH, main_grad)
    return embedding_reference(tokens, weight_VH, ids, position_weight, vocab_start, vocab_size)


def _check(
    weight_VH: Tensor, main_grad: Tensor | None, tokens: Tensor, positions: Positions | None,
    vocab_start: int, vocab_size: int,
) -> None:  # fmt: skip
    _check_table(weight_VH, main_grad)
    require(tokens.dtype in INTEGERS, "embedding takes ids that are integers.")
    if positions is not None:
        _check_table(positions.weight, positions.main_grad)
        require(positions.ids.dtype in INTEGERS, "embedding takes positions that are integers.")
        require(
            positions.ids.shape == tokens.shape and positions.weight.shape[1] == weight_VH.shape[1],
            "embedding takes a position id a token, and word and position weights of one hidden size.",
        )
        require(
            vocab_start == 0 and len(weight_VH) >= vocab_size,
            "embedding: positions cannot be added to a share of the vocabulary.",
            why="the sum over the ranks would count them once a rank.",
            mend="add them after the sum.",
        )


def _check_table(weight: Tensor, main_grad: Tensor | None) -> None:
    require(weight.dim() == 2, "embedding takes a weight [V, H].")
    require(
        main_grad is None or (main_grad.shape == weight.shape and main_grad.is_contiguous()),
        "embedding: main_grad must be contiguous and of the weight's shape.",
    )


def _fake_gather(tokens: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[1])


_KERNEL = "redline.kernels.embedding.kernel"
_gather = operator(
    "embedding_gather(Tensor tokens, Tensor weight, Tensor? positions, Tensor? position_weight,"
    " int vocab_start, int vocab_size) -> Tensor",
    lazily(_KERNEL, "gather"),
    _fake_gather,
)
_accumulate = operator(
    "embedding_accumulate_(Tensor(a!) main_grad, Tensor ids, Tensor dout, int vocab_start, int vocab_size)"
    " -> ()",
    lazily(_KERNEL, "accumulate"),
    lambda *_: None,
)


def _gradient(
    weight: Tensor, main_grad: Tensor | None, ids: Tensor, dout: Tensor, vocab_start: int, vocab_size: int
) -> Tensor | None:
    """Add into main_grad and return None, or return a dense gradient where there is no main_grad."""
    if main_grad is not None:
        _accumulate(main_grad, ids, dout, vocab_start, vocab_size)
        return None
    dense = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    _accumulate(dense, ids, dout, vocab_start, vocab_size)
    return dense.to(weight.dtype)


class EmbeddingFn(torch.autograd.Function):
    """Saves ids only; the main_grads ride on ctx as attributes."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, main_grad: Tensor | None, positions: Tensor | None,
        position_weight: Tensor | None, position_main_grad: Tensor | None, vocab_start: int, vocab_size: int,
    ) -> Tensor:  # fmt: skip
        tokens, weight = tokens.contiguous(), as_rows(weight)
        if position_weight is not None:
            position_weight = as_rows(position_weight)
        out: Tensor = _gather(tokens, weight, positions, position_weight, vocab_start, vocab_size)
        ctx.save_for_backward(tokens, positions, weight, position_weight)
        ctx.main_grads, ctx.vocab = (main_grad, position_main_grad), (vocab_start, vocab_size)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        tokens, positions, weight, position_weight = ctx.saved_tensors
        dout_TH = as_rows(dout)
        dweight = dposition = None
        if ctx.needs_input_grad[1]:
            dweight = _gradient(weight, ctx.main_grads[0], tokens, dout_TH, *ctx.vocab)
        if ctx.needs_input_grad[4]:
            dposition = _gradient(
                position_weight, ctx.main_grads[1], positions, dout_TH, 0, len(position_weight)
            )
        return None, dweight, None, None, dposition, None, None, None
