"""FlashAttention 4 (the package flash-attn-4, CuTe DSL) as an operator.

Bare, its Python breaks a graph of torch.compile; behind an operator the compiler sees two opaque calls. The
kernels write into tensors laid out [S, B, N, D], so that nothing is copied after them either.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.attention.spec import AttentionDropout, MaskSpec, check_shapes
from redline.kernels.common import contiguous_like, operator


@functools.cache
def _package() -> Any:
    from flash_attn.cute import interface

    return interface


def _heads_last(x_SBND: Tensor, packed: bool) -> Tensor:
    """The package's order: [B, S, N, D], or [S, N, D] of packed documents."""
    return x_SBND[:, 0] if packed else x_SBND.transpose(0, 1)


def _limit(side: int) -> int | None:
    return None if side < 0 else side


def _forward_launch(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, sink: Tensor | None, max_seqlen: int,
    causal: bool, left: int, right: int, scale: float, softcap: float, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    packed = cu_seqlens is not None
    out = contiguous_like(q)
    _, lse, *_ = _package()._flash_attn_fwd(
        *(_heads_last(each, packed) for each in (q, k, v)),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen if packed else None,
        max_seqlen_k=max_seqlen if packed else None,
        softmax_scale=scale,
        causal=causal and left < 0,
        softcap=softcap,
        window_size_left=_limit(left),
        window_size_right=None if causal and left < 0 else _limit(right),
        learnable_sink=sink,
        return_lse=True,
        out=_heads_last(out, packed),
    )
    return out, lse[None] if packed else lse


def _backward_launch(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    sink: Tensor | None, max_seqlen: int, causal: bool, left: int, right: int, scale: float, softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    packed = cu_seqlens is not None
    dq, dk, dv = map(contiguous_like, (q, k, v))
    extra = {} if sink is None else {"learnable_sink": sink}
    found = _package()._flash_attn_bwd(
        *(_heads_last(each, packed) for each in (q, k, v, out, do)),
        lse[0] if packed else lse,
        softmax_scale=scale,
        causal=causal and left < 0,
        softcap=softcap,
        window_size_left=_limit(left),
        window_size_right=None if causal and left < 0 else _limit(right),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen if packed else None,
        max_seqlen_k=max_seqlen if packed else None,
        deterministic=deterministic,
        dq=_heads_last(dq, packed),
        dk=_heads_last(dk, packed),
        dv=_heads_last(dv, packed),
        **extra,
    )
    return dq, dk, dv, lse.new_empty(0) if sink is None else found[3]


def _forward_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    S, B, N, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, N, S), dtype=torch.float32)


def _backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    sink: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


_OPTIONS = (
    "Tensor? cu_seqlens, Tensor? sink, int max_seqlen, bool causal, int left, int right, float scale,"
    " float softcap, bool deterministic"
)
_forward = operator(
    f"flash4_fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward_launch,
    _forward_fake,
)
_backward = operator(
    f"flash4_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_launch,
    _backward_fake,
)


class Flash4Fn(torch.autograd.Function):
    """Saves q, k, v, the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        sink: Tensor | None,
        *options: Any,
    ) -> Tensor:
        out, lse = _forward(q, k, v, cu_seqlens, sink, *options)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, sink)
        ctx.options = options
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens, sink = ctx.saved_tensors
        dq, dk, dv, dsink = _backward(do, *tensors, cu_seqlens, sink, *ctx.options)
        return dq, dk, dv, None, None if sink is None else dsink, *(None,) * len(ctx.options)


def flash4_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
    softcap: float = 0.0,
    sink_N: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """FlashAttention 4. Shapes as in spec.py; bf16 or fp16 on a GPU; no segments, no dropout."""
    assert dropout is None and mask.segment_ids_BS is None, "select_backend refuses these"
    check_shapes(q_SBND, k_SBGD, v_SBGD, mask, sink_N)
    left, right = mask.limits
    out: Tensor = Flash4Fn.apply(
        q_SBND, k_SBGD, v_SBGD, mask.cu_seqlens, sink_N, mask.max_seqlen, mask.causal, left, right,
        softmax_scale, softcap, deterministic,
    )  # fmt: skip
    return out
