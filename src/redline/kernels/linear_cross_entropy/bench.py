"""Projection and loss at Llama 3's vocabulary, hidden 4096 (8B) and 2048 (1B), 8,192 tokens.

Redline's side adds the weight's gradient to an fp32 main_grad, as in training; all FLOPs are counted forward,
where it does the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider, twins
from redline.kernels.common import accumulate_into
from redline.kernels.linear_cross_entropy.op import linear_cross_entropy
from redline.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from redline.kernels.loss_spec import LossSpec


def _liger() -> Provider:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor) -> Tensor:
        weight = accumulate_into(weight, main_grad)
        found: Tensor = LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum"
        )[0]
        return found

    return loss


def _quack() -> Provider:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor) -> Tensor:
        chunk = 4096 if hidden.shape[1] != 4096 else 2048  # 0.6.5 takes no square chunk of hidden states
        found: Tensor = chunked_linear_cross_entropy(
            hidden, accumulate_into(weight, main_grad), labels, chunk_size=chunk, reduction="sum"
        )
        return found

    return loss


def _case(tokens: int, hidden_size: int, vocab: int, quick: bool = False) -> BenchCase:
    spec = LossSpec(vocab_size=vocab)

    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(vocab, hidden_size, device=device, dtype=dtype).mul_(hidden_size**-0.5)
        labels = torch.randint(0, vocab, (tokens,), device=device)
        return hidden, weight.requires_grad_(), labels, torch.zeros(vocab, hidden_size, device=device)

    def fused(hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, spec, main_grad=main_grad)

    def eager(hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor) -> Tensor:
        return linear_cross_entropy_reference(hidden, accumulate_into(weight, main_grad), labels, spec)

    inputs = 2 * (tokens + vocab) * hidden_size + 8 * tokens
    return BenchCase(
        op="linear_cross_entropy",
        name=f"{tokens} x {hidden_size} x {vocab}",
        make_inputs=make_inputs,
        providers=twins(fused, eager, liger=_liger, quack=_quack),
        bytes_forward=inputs + 2 * tokens * hidden_size + 8 * vocab * hidden_size,
        bytes_backward=0,
        flops=6 * tokens * hidden_size * vocab,
        quick=quick,
        own_inputs=True,
    )


CASES = (_case(8192, 4096, 128_256), _case(8192, 2048, 128_256, quick=True))
