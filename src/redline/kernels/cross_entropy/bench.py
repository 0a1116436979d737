"""Sizes at which the loss is timed: vocabularies of Llama 3 and (padded) GPT-2."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider, twins
from redline.kernels.cross_entropy.op import cross_entropy
from redline.kernels.cross_entropy.reference import cross_entropy_reference
from redline.kernels.loss_spec import LossSpec


def _torch() -> Provider:
    return lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def _liger() -> Provider:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return lambda logits, labels: LigerCrossEntropyFunction.apply(
        logits, labels, None, -100, 0.0, 0.0, "mean"
    )[0]


def _quack() -> Provider:
    from quack.cross_entropy import cross_entropy as quack_cross_entropy

    return lambda logits, labels: quack_cross_entropy(logits, labels, reduction="none")


def _case(tokens: int, vocab: int) -> BenchCase:
    spec = LossSpec(vocab_size=vocab)

    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        logits = torch.randn(tokens, vocab, device=device, dtype=dtype, requires_grad=True)
        return logits, torch.randint(0, vocab, (tokens,), device=device)

    return BenchCase(
        op="cross_entropy",
        name=f"{tokens} x {vocab}",
        make_inputs=make_inputs,
        providers=twins(
            lambda logits, labels: cross_entropy(logits, labels, spec),
            lambda logits, labels: cross_entropy_reference(logits, labels, spec),
            torch=_torch,
            liger=_liger,
            quack=_quack,
        ),
        bytes_forward=tokens * vocab * 2 + tokens * (8 + 4 + 4),
        bytes_backward=2 * tokens * vocab * 2 + tokens * (8 + 4 + 4),
        own_inputs=True,
    )


CASES = (_case(8192, 128_256), _case(16384, 50_304))
