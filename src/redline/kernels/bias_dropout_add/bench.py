"""Sizes at which bias + dropout + residual is timed: 8,192 tokens of hidden 4096 and 2048, p = 0.1 and 0."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Loader, Provider, twins
from redline.kernels.bias_dropout_add.op import bias_dropout_add
from redline.kernels.bias_dropout_add.reference import DropoutKey, bias_dropout_add_reference
from redline.rng import stream_key


def _draw(x: Tensor) -> DropoutKey:
    key = torch.tensor(stream_key(1, "dropout", 0, "bench"), device=x.device)
    iteration = torch.tensor(7, device=x.device)
    return DropoutKey(key, iteration, torch.arange(x.shape[1], device=x.device))


def _torch(probability: float) -> Loader:
    def load() -> Provider:
        def unfused(x: Tensor, bias: Tensor, residual: Tensor, draw: DropoutKey) -> Tensor:
            return residual + torch.nn.functional.dropout(x + bias, probability)

        return torch.compile(unfused)

    return load


def _case(S: int, B: int, H: int, probability: float) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor | DropoutKey, ...]:
        shapes = ((S, B, H), (H,), (S, B, H))
        x, bias, residual = (torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes)
        return x, bias, residual, _draw(x)

    # Nothing dropped: dx is dy itself, and backward reads dy once for the bias.
    backward = (2 if probability else 1) * S * B * H * 2 + 2 * H
    return BenchCase(
        op="bias_dropout_add",
        name=f"{S} x {B} x {H}, p = {probability}",
        make_inputs=make_inputs,
        providers=twins(
            lambda x, bias, residual, draw: bias_dropout_add(x, bias, residual, probability, draw),
            lambda x, bias, residual, draw: bias_dropout_add_reference(x, bias, residual, probability, draw),
            torch=_torch(probability),
        ),
        bytes_forward=3 * S * B * H * 2 + H * 2,
        bytes_backward=backward,
    )


CASES = (_case(8192, 2, 4096, 0.1), _case(4096, 4, 2048, 0.1), _case(8192, 2, 4096, 0.0))
