"""Redline's own attention as an operator: support, autograd, and the parts for context parallelism."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.attention.probe import probe
from redline.attention.spec import AttentionDropout, MaskSpec, Request, check_shapes
from redline.kernels.common import FUSED_DTYPES, lazily, operator, why_not_interpreted, why_not_on

MAX_HEAD_DIM = 256


class Variant(NamedTuple):
    """Everything beside q, k and v, in the order in which the operators take it.

    Attributes:
        left, right: how many positions before and after its own a query looks; -1 is without limit.
        key, iteration, sample_index, positions, first_head: of the dropout mask (rng.py), None without.
    """

    cu_seqlens: Tensor | None
    segment_ids: Tensor | None
    sink: Tensor | None
    left: int
    right: int
    scale: float
    softcap: float = 0.0
    probability: float = 0.0
    key: Tensor | None = None
    iteration: Tensor | None = None
    sample_index: Tensor | None = None
    positions: Tensor | None = None
    first_head: int = 0


def supports(request: Request) -> str | None:
    """Why this backend cannot take `request`, or None."""
    if request.dtype not in FUSED_DTYPES:
        return f"it computes in fp32, bf16 and fp16, not in {str(request.dtype).removeprefix('torch.')}"
    if request.head_dim > MAX_HEAD_DIM:
        return f"a head of {request.head_dim} channels is above its {MAX_HEAD_DIM}"
    if request.device_type == "cpu" and request.dtype == torch.bfloat16:
        return "Triton's interpreter, which runs it on a CPU, multiplies the bits of bf16, not the values"
    if (reason := why_not_on(request.device_type)) or request.device_type == "cpu":
        return reason or why_not_interpreted()
    told = probe(local_attention, request)  # compiles, which a card with little shared memory may refuse
    return told and f"its kernels do not run on this card: {told}"


_VARIANT = (
    "Tensor? cu_seqlens, Tensor? segment_ids, Tensor? sink, int left, int right, float scale, float softcap,"
    " float probability, Tensor? key, Tensor? iteration, Tensor? sample_index, Tensor? positions,"
    " int first_head"
)
_LAUNCH = "redline.attention.local.launch"


def padded_length(length: int) -> int:
    """Numbers kept for each head in backward: whole units of 16 bytes, as descriptors fetch them."""
    return (length + 3) // 4 * 4


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *variant: Any) -> tuple[Tensor, Tensor]:
    S, B, N, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, N, S), dtype=torch.float32)


def _backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *variant: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S, B, N, _ = q.shape
    statistics = q.new_empty((2, B, N, padded_length(S)), dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), statistics


forward = operator(
    f"local_attention_fwd(Tensor q, Tensor k, Tensor v, {_VARIANT}) -> (Tensor, Tensor)",
    lazily(_LAUNCH, "forward"),
    _forward_fake,
)
backward = operator(
    f"local_attention_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_VARIANT})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lazily(_LAUNCH, "backward"),
    _backward_fake,
)


class LocalAttentionFn(torch.autograd.Function):
    """Saves q, k and v as they came, the output and the log-sum-exp; a dropout mask is drawn again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *variant: Any) -> Tensor:
        out, lse = forward(q, k, v, *variant)
        tensors = [each for each in variant if isinstance(each, Tensor)]
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.variant = tuple(None if isinstance(each, Tensor) else each for each in variant)
        ctx.held = tuple(isinstance(each, Tensor) for each in variant)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        rest = iter(tensors)
        variant = [next(rest) if held else each for held, each in zip(ctx.held, ctx.variant, strict=True)]
        dq, dk, dv, statistics = backward(do, q, k, v, out, lse, *variant)
        sink = variant[Variant._fields.index("sink")]
        dsink = None
        if sink is not None and ctx.needs_input_grad[5]:
            dsink = sink_gradient(sink, lse, statistics[0, ..., : q.shape[0]])
        return dq, dk, dv, None, None, dsink, *(None,) * (len(variant) - 3)


def sink_gradient(sink_N: Tensor, lse_BNS: Tensor, delta_BNS: Tensor) -> Tensor:
    """The sink's share of the softmax has no value behind it: its gradient is -share * delta, summed."""
    share_BNS = torch.exp(sink_N.to(lse_BNS.dtype)[None, :, None] - lse_BNS)
    return -(share_BNS * delta_BNS).sum((0, 2)).to(sink_N.dtype)


def variant_of(
    mask: MaskSpec,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
    softcap: float = 0.0,
    sink_N: Tensor | None = None,
) -> Variant:
    """The operators' arguments from those of an attention backend."""
    left, right = mask.limits
    plain = Variant(mask.cu_seqlens, mask.segment_ids_BS, sink_N, left, right, softmax_scale, softcap)
    if dropout is None:
        return plain
    state = dropout.state
    return plain._replace(
        probability=dropout.probability,
        key=dropout.key,
        iteration=state.iteration,
        sample_index=state.sample_index_B,
        positions=state.queries_S,
        first_head=state.first_head,
    )


def local_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
    softcap: float = 0.0,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Redline's FlashAttention. Shapes as in spec.py; bf16, fp16 or fp32, any strides with unit channels.

    Same bits every time. The parts for attention over several ranks: `forward` gives the output and its
    log-sum-exp [B, N, S] (natural, fp32; -inf where a query sees nothing), `backward` takes both, also when
    they belong to more keys than it is given; queries and keys may then differ in number.
    """
    check_shapes(q_SBND, k_SBGD, v_SBGD, mask, sink_N)
    variant = variant_of(mask, softmax_scale, dropout, softcap, sink_N)
    out: Tensor = LocalAttentionFn.apply(q_SBND, k_SBGD, v_SBGD, *variant)
    return out
