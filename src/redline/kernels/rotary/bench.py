"""Sizes at which rotary embedding is timed: the heads of Llama-3 8B and 1B, 16,384 tokens.

Of a merged projection each provider returns q, k and v, and is sent the gradient of each, as attention makes
them: apart, and heads after positions. What they move in backward:

- Redline, eager, compile: read the three and write the one gradient of the projection, q and k turned back.
- quack turns the projection in place and the gradient of the projection too, which autograd joins from the
  three (read and written once), before q and k are turned in it (read and written again).

Where q and k are projections of their own, as the models that liger patches have them, liger turns them and
their gradients in place; the others write new tensors, of as many bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Loader, Provider, twins
from redline.kernels.common import split_qkv
from redline.kernels.rotary.op import rotary, rotary_qkv


def _liger(head_dim: int) -> Loader:
    def load() -> Provider:
        from liger_kernel.ops.rope import LigerRopeFunction

        def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            q, k = LigerRopeFunction.apply(q, k, cos, sin, None, 1, head_dim)
            return q.transpose(1, 2), k.transpose(1, 2)

        return turn

    return load


def _quack(num_heads: int, num_groups: int, head_dim: int) -> Loader:
    def load() -> Provider:
        from quack.rotary import apply_rotary_emb_qkv_

        def turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            qkv = apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=num_heads, headdim=head_dim)
            return split_qkv(qkv, num_heads, num_groups, head_dim)

        return turn

    return load


def _batch_first(x: Tensor) -> Tensor:
    return x.detach().transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _for_quack(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """qkv [B, S, X]."""
    return _batch_first(qkv).requires_grad_(), cos, sin


def _for_liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """q, k [B, N or G, S, D]."""
    return *(_batch_first(x).transpose(1, 2).requires_grad_() for x in (q, k)), cos[None], sin[None]


def _table(S: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    angles = torch.arange(S, device=device)[:, None] * 500000.0**-pair
    return angles.cos().float(), angles.sin().float()


def _case(S: int, B: int, num_heads: int, num_groups: int, head_dim: int) -> BenchCase:
    total, turned = (num_heads + 2 * num_groups) * head_dim, (num_heads + num_groups) * head_dim

    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaf = torch.randn(S, B, total, device=device, dtype=dtype, requires_grad=True)
        return leaf.view(S, B, total), *_table(S, head_dim, device)

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
        providers=twins(
            run("auto"),
            run("reference"),
            quack=_quack(num_heads, num_groups, head_dim),
        ),
        bytes_forward=2 * S * B * turned * 2 + table_bytes,
        bytes_backward=2 * S * B * total * 2 + table_bytes,
        adapted={"quack": _for_quack},
        own_inputs=True,
    )


def _apart(S: int, B: int, num_heads: int, num_groups: int, head_dim: int) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k = (
            torch.randn(S, B, heads, head_dim, device=device, dtype=dtype, requires_grad=True)
            for heads in (num_heads, num_groups)
        )
        return q, k, *_table(S, head_dim, device)

    def run(impl: str) -> Provider:
        return lambda q, k, cos, sin: rotary(q, k, cos, sin, rotary_dim=head_dim, impl=impl)  # type: ignore[arg-type]

    num_bytes = 2 * S * B * (num_heads + num_groups) * head_dim * 2 + S * head_dim * 4
    return BenchCase(
        op="rotary",
        name=f"{S} x {B}, q and k apart, heads {num_heads}/{num_groups} x {head_dim}",
        make_inputs=make_inputs,
        providers=twins(run("auto"), run("reference"), liger=_liger(head_dim)),
        bytes_forward=num_bytes,
        bytes_backward=num_bytes,
        adapted={"liger": _for_liger},
        quick=True,
    )


CASES = (_case(8192, 2, 32, 8, 128), _case(8192, 2, 32, 8, 64), _apart(8192, 2, 32, 8, 128))
