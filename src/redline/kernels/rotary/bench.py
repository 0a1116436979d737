"""Sizes at which rotary embedding is timed: the heads of Llama-3 8B and 1B, 16,384 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Loader, Provider, twins
from redline.kernels.rotary.op import rotary_qkv


def _liger(num_heads: int, num_groups: int, head_dim: int) -> Loader:
    def load() -> Provider:
        from liger_kernel.ops.rope import LigerRopeFunction

        def run(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            S, B, _ = qkv.shape
            heads = qkv.view(S, B, -1, head_dim).permute(1, 2, 0, 3)  # [B, heads, S, D]
            q, k, v = heads.split((num_heads, num_groups, num_groups), dim=1)
            turned = LigerRopeFunction.apply(q, k, cos[None], sin[None], None, 1, head_dim)
            return *turned, v

        return run

    return load


def _case(S: int, B: int, num_heads: int, num_groups: int, head_dim: int) -> BenchCase:
    total, turned = (num_heads + 2 * num_groups) * head_dim, (num_heads + num_groups) * head_dim

    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaf = torch.randn(S, B, total, device=device, dtype=dtype, requires_grad=True)
        pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
        angles = torch.arange(S, device=device)[:, None] * 500000.0**-pair
        return leaf.view(S, B, total), angles.cos().float(), angles.sin().float()

    def run(impl: str) -> Provider:
        return lambda qkv, cos, sin: rotary_qkv(
            qkv, cos, sin, num_heads=num_heads, num_groups=num_groups, head_dim=head_dim, rotary_dim=head_dim,
            impl=impl,  # type: ignore[arg-type]
        )  # fmt: skip

    table_bytes = S * head_dim * 4
    return BenchCase(
        op="rotary",
        name=f"{S} x {B}, heads {num_heads}/{num_groups} x {head_dim}",
        make_inputs=make_inputs,
        providers=twins(run("auto"), run("reference"), liger=_liger(num_heads, num_groups, head_dim)),
        bytes_forward=2 * S * B * turned * 2 + table_bytes,
        bytes_backward=2 * S * B * total * 2 + table_bytes,
    )


CASES = (_case(8192, 2, 32, 8, 128), _case(8192, 2, 32, 8, 64))
