"""Sizes at which QK norm is timed: the heads of Qwen3-8B (32/8, head 128), 16,384 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider, twins
from redline.kernels.qk_norm.op import qk_norm
from redline.kernels.qk_norm.reference import Kind, QKNormParams, qk_norm_reference


def _case(S: int, B: int, num_heads: int, num_groups: int, head_dim: int, kind: Kind) -> BenchCase:
    total, normed = (num_heads + 2 * num_groups) * head_dim, (num_heads + num_groups) * head_dim
    sizes = (num_heads, num_groups, head_dim)

    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((S, B, total),) if kind == "l2" else ((S, B, total), (head_dim,), (head_dim,))
        return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    def run(fn: Any) -> Provider:
        def call(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = fn(qkv, QKNormParams(*weights))
            return outputs

        return call

    return BenchCase(
        op="qk_norm",
        name=f"{S} x {B}, heads {num_heads}/{num_groups} x {head_dim}, {kind}",
        make_inputs=make_inputs,
        providers=twins(
            run(
                lambda qkv, p: qk_norm(
                    qkv, p, num_heads=num_heads, num_groups=num_groups, head_dim=head_dim, kind=kind
                )
            ),
            run(lambda qkv, p: qk_norm_reference(qkv, p, *sizes, kind)),
        ),
        bytes_forward=2 * S * B * normed * 2,
        bytes_backward=S * B * (2 * total + normed) * 2,
    )


CASES = (_case(8192, 2, 32, 8, 128, "rms"), _case(8192, 2, 32, 8, 128, "l2"))
