"""The norm of 2^29 gradients, fp32 and bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider, twins
from redline.kernels.grad_norm.op import grad_statistics
from redline.kernels.grad_norm.reference import grad_statistics_reference

SIZE = 1 << 29


def _torch() -> Provider:
    return lambda grad: torch.linalg.vector_norm(grad, dtype=torch.float32)


def _case(dtype: torch.dtype) -> BenchCase:
    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (torch.randn(SIZE, device=device, dtype=dtype),)

    return BenchCase(
        op="grad_norm",
        name=f"2^29 {str(dtype).removeprefix('torch.')}",
        make_inputs=make_inputs,
        providers=twins(
            lambda grad: grad_statistics([grad]),
            lambda grad: grad_statistics_reference([grad]),
            torch=_torch,
        ),
        bytes_forward=SIZE * dtype.itemsize,
        dtype=dtype,
    )


CASES = (_case(torch.float32), _case(torch.bfloat16))
