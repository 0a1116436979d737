"""Does a backend take a request? A few tokens through it, forward and backward, are the sure answer.

The conditions of a kernel (head size, length, card, release) differ by version, and its documents lag behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from redline.attention.spec import Attention, MaskSpec, Request
from redline.errors import first_line

PROBE_LENGTH = 256


class Inputs:
    """Tensors as a run hands them over: q, k and v are views of one merged projection [S, B, (N + 2G) D]."""

    def __init__(self, request: Request, lengths: Sequence[int], batch: int) -> None:
        seq_length = sum(lengths)
        N, G, D = request.num_heads, request.num_groups, request.head_dim
        device = request.device_type
        generator = torch.Generator(device).manual_seed(0)
        self.qkv_SBX = torch.randn(
            (seq_length, batch, (N + 2 * G) * D), dtype=request.dtype, device=device, generator=generator
        ).requires_grad_()
        self.grad_SBND = torch.randn(
            (seq_length, batch, N, D), dtype=request.dtype, device=device, generator=generator
        )
        self.sink_N = _sinks(N, request) if request.sinks else None
        self.mask = mask_of(request, lengths, batch)
        self.request = request

    def output(self, attention: Attention) -> Tensor:
        """Forward."""
        request, D = self.request, self.request.head_dim
        sizes = [n * D for n in (request.num_heads, request.num_groups, request.num_groups)]
        q, k, v = (part.unflatten(-1, (-1, D)) for part in self.qkv_SBX.split(sizes, dim=-1))
        return attention(
            q, k, v, self.mask, softmax_scale=D**-0.5, softcap=request.softcap, sink_N=self.sink_N
        )

    def step(self, attention: Attention) -> None:
        """Forward and backward."""
        self.output(attention).backward(self.grad_SBND)
        self.qkv_SBX.grad = None


def _sinks(num_heads: int, request: Request) -> Tensor:
    """As the model hands them over: in fp32 at least, with a gradient."""
    wide = torch.promote_types(request.dtype, torch.float32)
    return torch.zeros(num_heads, dtype=wide, device=request.device_type, requires_grad=True)


def mask_of(request: Request, lengths: Sequence[int], batch: int) -> MaskSpec:
    """The request's mask over documents of these lengths, with one entry of padding behind them."""
    segments = cu_seqlens = None
    device = request.device_type
    if request.segments:
        numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
        segments = torch.tensor([numbers] * batch, dtype=torch.int32, device=device)
    if request.packed:
        ends = [*accumulate(lengths, initial=0), sum(lengths)]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    longest = max(lengths) if request.packed else 0
    return MaskSpec(request.causal, segments, request.window, cu_seqlens, longest)


def probe(attention: Attention, request: Request) -> str | None:
    """Run `attention` forward and backward on a few tokens; its reason if it refuses the request, or None."""
    length = min(request.seq_length, PROBE_LENGTH)
    inputs = Inputs(request, (length - length // 3, length // 3), 1)
    with _all_warnings() as said, torch.enable_grad():
        try:
            inputs.step(attention)
        except Exception as error:  # PyTorch, Triton and the packages each raise what they like
            told = [str(warning.message).split(" (Triggered")[0].rstrip(".") for warning in said]
            reasons = [text for text in told if not text.endswith(("because:", "runtime disabled"))]
            return "; ".join(reasons or [first_line(error)])
    return None


@contextmanager
def _all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings, also those that PyTorch gives only once a process: they hold its reasons."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        torch.set_warn_always(before)
