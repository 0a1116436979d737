"""A step over 2^28 parameters in four storages: 28, 30, 20 and 16.1 bytes an element read and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from redline.formulas.state import CODE_BLOCK
from redline.kernels.adamw.codes import encode
from redline.kernels.adamw.op import FlatState, Hyper, adamw_, adamw_hyper
from redline.kernels.adamw.reference import split_main
from redline.kernels.bench_case import BenchCase, Provider, twins

SIZE = 1 << 28
BETAS = (0.9, 0.95)
EPS = 1e-8


def _fused(state: FlatState, hyper: Hyper, factor: Tensor) -> Tensor:
    adamw_(state, hyper, grad_factor=factor)
    return state.param


def _eager(state: FlatState, hyper: Hyper, factor: Tensor) -> Tensor:
    adamw_(state, hyper, grad_factor=factor, impl="reference")
    return state.param


def _torch() -> Provider:
    def step(state: FlatState, hyper: Hyper, factor: Tensor) -> Tensor:
        torch._fused_adamw_(
            [state.param], [state.grad], [state.exp_avg], [state.exp_avg_sq], [], [torch.ones_like(factor)],
            lr=1e-3, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.1, eps=EPS, amsgrad=False, maximize=False,
            grad_scale=factor,
        )  # fmt: skip
        return state.param

    return step


def _cut(inputs: Sequence[Any], rows: int) -> tuple[Any, ...]:
    """The state of the first `rows` blocks of elements; a block has one top, where moments have 8 bits."""
    state, *rest = inputs
    left: dict[str, Any] = {}
    for name in (each.name for each in fields(state)):
        tensor, length = getattr(state, name), rows if name.endswith("_top") else rows * CODE_BLOCK
        left[name] = tensor if tensor is None else tensor[:length]
    return FlatState(**left), *rest


def _case(name: str, bytes_each: float, main: str, moments: torch.dtype) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[FlatState, Hyper, Tensor]:
        values = torch.randn(SIZE, device=device)
        grad = torch.randn(SIZE, device=device) * 1e-3
        exp_avg, exp_avg_sq = torch.zeros(SIZE, device=device), torch.full((SIZE,), 1e-6, device=device)
        tops: list[Tensor] = []
        if moments == torch.uint8:
            exp_avg, top = encode(exp_avg, 0, signed=True)
            exp_avg_sq, top_sq = encode(exp_avg_sq, 0, signed=False)
            tops = [top, top_sq]
        kept: Tensor | None = values if main == "separate" else None
        param = values.to(dtype)
        if main == "remainder":
            param, kept = split_main(values)
        hyper = adamw_hyper(
            step=1, lr=[1e-3], weight_decay=[0.1], beta1=BETAS[0], beta2=BETAS[1], eps=EPS, device=device
        )
        state = FlatState(param, grad, exp_avg.to(moments), exp_avg_sq.to(moments), kept, *tops)
        return state, hyper, torch.ones((), device=device)

    libraries = {"torch": _torch} if main == "none" else {}
    return BenchCase(
        op="adamw",
        name=name,
        make_inputs=make_inputs,
        providers=twins(_fused, _eager, **libraries),
        bytes_forward=round(bytes_each * SIZE),
        dtype=torch.float32 if main == "none" else torch.bfloat16,
        cut=_cut,
        own_inputs=True,
    )


CASES = (
    _case("fp32", 28, "none", torch.float32),
    _case("bf16 + fp32 main", 30, "separate", torch.float32),
    _case("bf16 + remainder, bf16 moments", 20, "remainder", torch.bfloat16),
    _case("bf16 + remainder, 8-bit moments", 16.125, "remainder", torch.uint8),
)
