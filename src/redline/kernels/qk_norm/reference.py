"""QK norm in plain PyTorch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from redline.kernels.common import accumulate_into, compute_dtype, split_qkv

Kind = Literal["rms", "layer", "l2"]
KINDS = ("rms", "layer", "l2")


class QKNormParams(NamedTuple):
    """The vectors [D] of a QK norm: none for kind "l2", weights for "rms", weights (and biases) for "layer".

    A `_main_grad` is a buffer [D] to which the gradient of that parameter is added; the parameter then gets
    no gradient of its own.
    """

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    q_weight_main_grad: Tensor | None = None
    k_weight_main_grad: Tensor | None = None
    q_bias_main_grad: Tensor | None = None
    k_bias_main_grad: Tensor | None = None


def head_norm_reference(
    x_SBND: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind, eps: float, zero_centered: bool
) -> Tensor:
    """Each head's channels: "rms" and "l2" divide by sqrt(mean(x^2) + eps), "layer" first subtracts the mean.

    Then times weight (1 + weight when zero-centred), plus bias, where given. fp32 inside, rounded once.
    Source: Dehghani et al. 2023, arXiv 2302.05442, section 2.
    """
    wide = x_SBND.to(compute_dtype(x_SBND))
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(y.dtype) + 1.0 if zero_centered else weight)
    return (y if bias is None else y + bias).to(x_SBND.dtype)


def qk_norm_reference(
    qkv_SBX: Tensor,
    params: QKNormParams,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    kind: Kind = "rms",
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k normalised head by head, and v as it is.

    Shapes: qkv [S, B, (N + 2G) D], last dim [q | k | v] -> [S, B, N, D], [S, B, G, D], [S, B, G, D].
    """
    q, k, v = split_qkv(qkv_SBX, num_heads, num_groups, head_dim)
    p = params
    q_weight, k_weight, q_bias, k_bias = (
        None if vector is None else accumulate_into(vector, main_grad)
        for vector, main_grad in (
            (p.q_weight, p.q_weight_main_grad),
            (p.k_weight, p.k_weight_main_grad),
            (p.q_bias, p.q_bias_main_grad),
            (p.k_bias, p.k_bias_main_grad),
        )
    )
    return (
        head_norm_reference(q, q_weight, q_bias, kind, eps, zero_centered),
        head_norm_reference(k, k_weight, k_bias, kind, eps, zero_centered),
        v,
    )
