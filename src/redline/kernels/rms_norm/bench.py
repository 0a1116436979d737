"""Sizes at which RMSNorm is timed: hidden sizes of Llama models, 16,384 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider, twins
from redline.kernels.rms_norm.op import add_rms_norm, rms_norm
from redline.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

EPS = 1e-5


def _torch() -> Provider:
    return lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def _liger() -> Provider:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def _quack() -> Provider:
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def _liger_add() -> Provider:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, EPS, 0.0, "llama", False
    )


def _quack_add() -> Provider:
    from quack import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _case(rows: int, cols: int) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = torch.randn(rows, cols, device=device, dtype=dtype, requires_grad=True)
        return x, torch.randn(cols, device=device, dtype=dtype, requires_grad=True)

    return BenchCase(
        op="rms_norm",
        name=f"{rows} x {cols}",
        make_inputs=make_inputs,
        providers=twins(
            lambda x, weight: rms_norm(x, weight, EPS),
            lambda x, weight: rms_norm_reference(x, weight, EPS),
            torch=_torch,
            liger=_liger,
            quack=_quack,
        ),
        bytes_forward=2 * rows * cols * 2 + cols * 2 + rows * 4,
        bytes_backward=3 * rows * cols * 2 + 2 * cols * 2 + rows * 4,
    )


def _add_case(rows: int, cols: int) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((rows, cols), (rows, cols), (cols,))
        return tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    return BenchCase(
        op="rms_norm",
        name=f"residual + {rows} x {cols}",
        make_inputs=make_inputs,
        providers=twins(
            lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
            lambda x, residual, weight: add_rms_norm_reference(x, residual, weight, EPS),
            liger=_liger_add,
            quack=_quack_add,
        ),
        bytes_forward=4 * rows * cols * 2 + cols * 2 + rows * 4,
        bytes_backward=4 * rows * cols * 2 + 2 * cols * 2 + rows * 4,
    )


CASES = (_case(16384, 4096), _case(16384, 2048), _case(8192, 8192), _add_case(16384, 4096))
