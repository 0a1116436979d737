"""QK norm as an operator: support, autograd, the choice of kernel or reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from redline.errors import ShapeError
from redline.kernels.common import Impl, apply, buffer_of, lazily, operator, use_triton, why_not
from redline.kernels.qk_norm.reference import KINDS, Kind, QKNormParams, qk_norm_reference

MAX_HEAD_DIM = 2048


def supports(qkv_SBX: Tensor, params: QKNormParams, head_dim: int) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    if head_dim > MAX_HEAD_DIM:
        return f"a head of {head_dim} channels is longer than the kernel's {MAX_HEAD_DIM}"
    return why_not(qkv_SBX, *params[:4])


def _forward_fake(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None,
    num_heads: int, num_groups: int, head_dim: int, layer: bool, eps: float, zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    S, B, _ = qkv.shape
    return qkv.new_empty((S, B, num_heads, head_dim)), qkv.new_empty((S, B, num_groups, head_dim))


def _backward_fake(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None,
    q_weight_main_grad: Tensor | None, k_weight_main_grad: Tensor | None,
    q_bias_main_grad: Tensor | None, k_bias_main_grad: Tensor | None,
    layer: bool, eps: float, zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def grad(vector: Tensor | None, main_grad: Tensor | None) -> Tensor:
        none = vector is None or main_grad is not None
        return qkv.new_empty(0) if none or vector is None else vector.new_empty(vector.shape)

    return (
        qkv.new_empty(qkv.shape),
        grad(q_weight, q_weight_main_grad),
        grad(k_weight, k_weight_main_grad),
        grad(q_bias, q_bias_main_grad),
        grad(k_bias, k_bias_main_grad),
    )


_KERNEL = "redline.kernels.qk_norm.kernel"
_VECTORS = "Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias"
_forward = operator(
    f"qk_norm_fwd(Tensor qkv, {_VECTORS}, int num_heads, int num_groups, int head_dim, bool layer, float eps,"
    " bool zero_centered) -> (Tensor, Tensor)",
    lazily(_KERNEL, "forward"),
    _forward_fake,
)
_backward = operator(
    f"qk_norm_bwd(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, {_VECTORS}, Tensor(a!)? q_weight_main_grad,"
    " Tensor(b!)? k_weight_main_grad, Tensor(c!)? q_bias_main_grad, Tensor(d!)? k_bias_main_grad, bool layer,"
    " float eps, bool zero_centered) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lazily(_KERNEL, "backward"),
    _backward_fake,
)


def _values(qkv: Tensor, num_heads: int, num_groups: int, head_dim: int) -> Tensor:
    """The view [S, B, G, D] of the last heads; in eager mode by one operator instead of two."""
    S, B, width = qkv.shape
    start = (num_heads + num_groups) * head_dim
    if is_compiling():  # a traced tensor's place in its storage is not that of the real one
        return qkv.narrow(2, start, width - start).view(S, B, num_groups, head_dim)
    strides = (B * width, width, head_dim, 1)
    return qkv.as_strided((S, B, num_groups, head_dim), strides, qkv.storage_offset() + start)


class QKNormFn(torch.autograd.Function):
    """Saves qkv and the vectors, no statistics; main grads ride on ctx as attributes.

    Backward makes the one gradient of qkv, so that splitting costs no concatenation. q and k are tensors of
    their own: of views of one result torch.compile (seen in PyTorch 2.11) sends the gradients to that result,
    which backward never sees.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
        k_bias: Tensor | None, main_grads: tuple[Tensor | None, ...],
        form: tuple[int, int, int, bool, float, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(qkv, q_weight, k_weight, q_bias, k_bias)
        ctx.main_grads, ctx.form = main_grads, form
        q, k = _forward(qkv, q_weight, k_weight, q_bias, k_bias, *form)
        return q, k, _values(qkv, *form[:3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, *vectors = ctx.saved_tensors
        dqkv, *grads = _backward(dq, dk, dv, qkv, *vectors, *ctx.main_grads, *ctx.form[3:])
        own = [
            None if vector is None or main_grad is not None else grad
            for vector, main_grad, grad in zip(vectors, ctx.main_grads, grads, strict=True)
        ]
        return dqkv, *own, None, None


def qk_norm(
    qkv_SBX: Tensor,
    params: QKNormParams,
    *,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    kind: Kind = "rms",
    eps: float = 1e-5,
    zero_centered: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a merged projection into q, k and v, with each head of q and k normalised over its channels.

    Shapes: qkv [S, B, (N + 2G) D] contiguous, last dim [q | k | v] -> [S, B, N, D] and two of [S, B, G, D],
    of which v is a view of qkv. fp32 inside, rounded once.
    Args:
        kind: "rms", "layer" (subtracts the mean), or "l2" (rms without a weight).
        zero_centered: the weight counts from 1.
        impl: "triton", "reference", or "auto" (the kernel where `supports` has no objection).
    Raises: ShapeError when shapes or parameters do not fit, ConfigError when impl="triton" cannot run.
    """
    shape, width = qkv_SBX.shape, (num_heads + 2 * num_groups) * head_dim
    if not (len(shape) == 3 and shape[2] == width and qkv_SBX.is_contiguous()):
        raise ShapeError(
            f"qk_norm: qkv {tuple(qkv_SBX.shape)} does not fit heads {num_heads}/{num_groups} of {head_dim}.",
            "it is contiguous, and its last dim holds the q, then the k, then the v heads.",
        )
    _check_params(params, head_dim, kind)
    if use_triton("qk_norm", impl, supports(qkv_SBX, params, head_dim)):
        form = (num_heads, num_groups, head_dim, kind == "layer", eps, zero_centered)
        grads = tuple(map(buffer_of, params[:4], params[4:]))
        q, k, v = apply(QKNormFn, qkv_SBX, *params[:4], grads, form)
        return q, k, v
    return qk_norm_reference(qkv_SBX, params, num_heads, num_groups, head_dim, kind, eps, zero_centered)


def _check_params(params: QKNormParams, head_dim: int, kind: Kind) -> None:
    if kind not in KINDS:
        raise ShapeError(f"qk_norm: kind={kind!r} is not one of {KINDS}.")
    q_weight, k_weight, q_bias, k_bias, *_ = params
    if not (
        (q_weight is None) == (k_weight is None) == (kind == "l2")
        and (q_bias is None) == (k_bias is None)
        and (kind == "layer" or q_bias is None)
    ):
        raise ShapeError(
            f"qk_norm: these weights and biases are not those of kind {kind!r}.",
            '"l2" has none, "rms" has two weights, "layer" has two weights and two biases or none.',
        )
    shape = (head_dim,)
    for vector in params:
        if not (vector is None or (vector.shape == shape and vector.is_contiguous())):
            raise ShapeError(
                f"qk_norm: a weight, bias or main grad is not one contiguous vector of head_dim = {head_dim}."
            )
