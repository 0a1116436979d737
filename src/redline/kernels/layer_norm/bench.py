"""Sizes at which LayerNorm is timed: hidden sizes of GPT models, 16,384 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider, twins
from redline.kernels.layer_norm.op import add_layer_norm, layer_norm
from redline.kernels.layer_norm.reference import add_layer_norm_reference, layer_norm_reference

EPS = 1e-5


def _torch() -> Provider:
    return lambda x, weight, bias: torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPS)


def _liger() -> Provider:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _quack() -> Provider:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class QuackLayerNorm(torch.autograd.Function):
        """quack has the two kernels, no autograd; it takes fp32 vectors only."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            wide = weight.float()
            y, rstd, mean = layernorm_fwd(x, wide, bias.float(), EPS, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, wide, rstd, mean)
            return y  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
            x, weight, rstd, mean = ctx.saved_tensors
            dx, dweight, dbias = layernorm_bwd(x, weight, dy, rstd, mean)
            return dx, dweight.to(x.dtype), dbias.to(x.dtype)

    return lambda x, weight, bias: QuackLayerNorm.apply(x, weight, bias)


def _inputs(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)


def _case(rows: int, cols: int) -> BenchCase:
    return BenchCase(
        op="layer_norm",
        name=f"{rows} x {cols}",
        make_inputs=lambda device, dtype: _inputs(device, dtype, (rows, cols), (cols,), (cols,)),
        providers=twins(
            lambda x, weight, bias: layer_norm(x, weight, bias, EPS),
            lambda x, weight, bias: layer_norm_reference(x, weight, bias, EPS),
            torch=_torch,
            liger=_liger,
            quack=_quack,
        ),
        bytes_forward=2 * rows * cols * 2 + 2 * cols * 2 + rows * 8,
        bytes_backward=3 * rows * cols * 2 + 3 * cols * 2 + rows * 8,
    )


def _add_case(rows: int, cols: int) -> BenchCase:
    return BenchCase(
        op="layer_norm",
        name=f"residual + {rows} x {cols}",
        make_inputs=lambda device, dtype: _inputs(
            device, dtype, (rows, cols), (rows, cols), (cols,), (cols,)
        ),
        providers=twins(
            lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias, EPS),
            lambda x, residual, weight, bias: add_layer_norm_reference(x, residual, weight, bias, EPS),
        ),
        bytes_forward=4 * rows * cols * 2 + 2 * cols * 2 + rows * 8,
        bytes_backward=4 * rows * cols * 2 + 3 * cols * 2 + rows * 8,
    )


CASES = (_case(16384, 4096), _case(16384, 2048), _case(8192, 8192), _add_case(16384, 4096))
