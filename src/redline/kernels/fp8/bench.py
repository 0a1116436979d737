"""Sizes at which casts to fp8 are timed: a microbatch of the 8B shape. None has a backward of its own.

Four samples of 8,192 tokens where a token is 4,096 values, one where it is 14,336 or more: what starting a
kernel costs, some 8 us between the events that time it, is then a few percent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from redline.kernels.activation_reference import Form
from redline.kernels.bench_case import LIMITED, BenchCase, Provider, twins
from redline.kernels.fp8 import block_op, op, reference
from redline.kernels.fp8.block_reference import SIDE

T, TOKENS, H, F = 8192, 32768, 4096, 14336
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GELU = Form("tanh")
SWIGLU = Form("silu", gated=True)
LIMITED_SWIGLU = Form("silu", gated=True, **LIMITED)


def _case(
    name: str,
    sizes: tuple[tuple[int, ...], ...],
    make: Callable[[Any, bool], Provider],
    num_bytes: int,
    given: torch.dtype | None = None,
) -> BenchCase:
    """`given`: what the inputs are cast to, where they are not of the dtype that is asked for."""

    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        state = torch.full((1,), 32.0, device=device), torch.zeros(1, device=device)
        drawn = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
        return (*(each if given is None else each.to(given) for each in drawn), *state)

    return BenchCase(
        op="fp8",
        name=name,
        make_inputs=make_inputs,
        providers=twins(make(op, True), make(reference, False)),
        bytes_forward=num_bytes,
    )


def _end(kernel: bool) -> tuple[bool, ...]:
    """The operators take one argument more than their twins: whether the kernel runs."""
    return (True,) if kernel else ()


def _cast(columns: bool) -> Callable[[Any, bool], Provider]:
    def make(room: Any, kernel: bool) -> Provider:
        return lambda x, scale, amax: room.cast(x, scale, amax, E4M3, True, columns, *_end(kernel))

    return make


def _transpose(room: Any, kernel: bool) -> Provider:
    turned = op.transpose if kernel else reference.transposed
    return lambda q, *_: turned(q, *_end(kernel))


def _norm(room: Any, kernel: bool) -> Provider:
    return lambda x, w, scale, amax: room.norm_cast(
        x, w, None, False, 1e-5, False, scale, amax, E4M3, *_end(kernel)
    )


def _activation(form: Form) -> Callable[[Any, bool], Provider]:
    def make(room: Any, kernel: bool) -> Provider:
        return lambda x, scale, amax: room.activation_cast(x, None, *form, scale, amax, E4M3, *_end(kernel))

    return make


def _backward(form: Form) -> Callable[[Any, bool], Provider]:
    def make(room: Any, kernel: bool) -> Provider:
        def run(dy: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            *bias, scale, amax = rest
            found: tuple[Tensor, ...] = room.activation_cast_backward(
                dy, x, bias[0] if bias else None, None, *form, scale, amax, E5M2, *_end(kernel)
            )
            return found

        return run

    return make


def _blocks(room: Any, kernel: bool) -> Provider:
    return lambda x, scale, amax: block_op.block_cast(x, E4M3, 128, True, kernel)


def _squares(room: Any, kernel: bool) -> Provider:
    return lambda w, scale, amax: block_op.square_cast(w, E4M3, kernel)


def _cut_to_squares(inputs: Sequence[Any], rows: int) -> tuple[Any, ...]:
    """So many rows of squares: a weight has whole ones."""
    w, *state = inputs
    return (w[: rows * SIDE], *state)


CASES = (
    _case(f"cast {TOKENS} x {H}", ((TOKENS, H),), _cast(False), 3 * TOKENS * H),
    _case(f"cast, both layouts, {TOKENS} x {H}", ((TOKENS, H),), _cast(True), 4 * TOKENS * H),
    _case(f"cast, both layouts, {T} x {2 * F}", ((T, 2 * F),), _cast(True), 4 * T * 2 * F),
    _case(f"transpose of fp8, {T} x {F}", ((T, F),), _transpose, 2 * T * F, given=E4M3),
    _case(
        f"cast by blocks, both layouts, {TOKENS} x {H}",
        ((TOKENS, H),),
        _blocks,
        4 * TOKENS * H + TOKENS * H // 16,
    ),
    replace(
        _case(
            f"cast by squares, both layouts, {2 * F} x {H}",
            ((2 * F, H),),
            _squares,
            8 * F * H + 16 * F * H // SIDE**2,
        ),
        cut=_cut_to_squares,
    ),
    _case(f"RMSNorm to fp8, {TOKENS} x {H}", ((TOKENS, H), (H,)), _norm, 3 * TOKENS * H + 2 * H + 4 * TOKENS),
    *(
        case
        for word, form in (("", SWIGLU), (", limited", LIMITED_SWIGLU))
        for case in (
            _case(f"SwiGLU to fp8, {T} x 2*{F}{word}", ((T, 2 * F),), _activation(form), 5 * T * F),
            _case(
                f"SwiGLU backward to fp8, {T} x 2*{F}{word}",
                ((T, F), (T, 2 * F)),
                _backward(form),
                10 * T * F,
            ),
        )
    ),
    _case(f"GELU backward to fp8, {T} x {F}", ((T, F), (T, F)), _backward(GELU), 6 * T * F),
    _case(
        f"GELU backward to fp8, with its bias, {T} x {F}",
        ((T, F), (T, F), (F,)),
        _backward(GELU),
        6 * T * F + 4 * F,
    ),
    _case(
        f"SwiGLU backward to fp8, with its bias, {T} x 2*{F}",
        ((T, F), (T, 2 * F), (2 * F,)),
        _backward(SWIGLU),
        10 * T * F + 8 * F,
    ),
)
