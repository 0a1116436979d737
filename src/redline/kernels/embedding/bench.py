"""Llama 3's word embedding (hidden 4096), and GPT-2's with positions; 16,384 tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider, twins
from redline.kernels.common import accumulate_into
from redline.kernels.embedding.op import Positions, embedding
from redline.kernels.embedding.reference import embedding_reference


def _torch() -> Provider:
    return lambda tokens, weight, main_grad: F.embedding(tokens, accumulate_into(weight, main_grad))


def _eager(tokens: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
    return embedding_reference(tokens, accumulate_into(weight, main_grad))


def _words(tokens: int, vocab: int, hidden: int) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weight = torch.randn(vocab, hidden, device=device, dtype=dtype, requires_grad=True)
        ids = torch.randint(0, vocab, (tokens,), device=device)
        return ids, weight, torch.zeros(vocab, hidden, device=device)

    return BenchCase(
        op="embedding",
        name=f"{tokens} of {vocab} x {hidden}",
        make_inputs=make_inputs,
        providers=twins(
            lambda ids, weight, main_grad: embedding(ids, weight, main_grad=main_grad), _eager, torch=_torch
        ),
        bytes_forward=tokens * (2 * hidden * 2 + 8),
        bytes_backward=tokens * (hidden * 2 + 8) + 2 * 4 * hidden * round(_distinct(tokens, vocab)),
    )


def _distinct(tokens: int, vocab: int) -> float:
    """Expected number of different ids among uniform draws: the rows of main_grad that are touched."""
    return vocab * (1.0 - (1.0 - 1.0 / vocab) ** tokens)


def _with_positions(sequences: int, length: int, vocab: int, hidden: int) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weight = torch.randn(vocab, hidden, device=device, dtype=dtype)
        table = torch.randn(length, hidden, device=device, dtype=dtype)
        ids = torch.randint(0, vocab, (length, sequences), device=device)
        return ids, weight, torch.arange(length, device=device)[:, None].expand(length, sequences), table

    return BenchCase(
        op="embedding",
        name=f"{sequences} x {length} of {vocab} x {hidden} + positions, forward",
        make_inputs=make_inputs,
        providers=twins(
            lambda ids, weight, places, table: embedding(ids, weight, positions=Positions(places, table)),
            embedding_reference,
        ),
        bytes_forward=sequences * length * (2 * hidden * 2 + 16) + length * hidden * 2,
    )


CASES = (_words(16384, 128_256, 4096), _with_positions(16, 1024, 50_257, 1600))
