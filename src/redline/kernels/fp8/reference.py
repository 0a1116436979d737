"""fp8 in plain PyTorch: how a tensor is scaled, saturated and rounded, and what a GEMM of two such gives.

    q = round(clamp(x * scale, -max, max)),  x ~ q / scale,  amax = max |x|

E4M3 reaches 448 with 3 bits of mantissa, E5M2 57344 with 2 (Micikevicius et al. 2022, arXiv 2209.05433).
Values out of range saturate; NaN stays NaN. Bit for bit what the kernels and the GPU's own conversion give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.formulas.fp8_sizes import FP8_MULTIPLES
from redline.kernels.activation_reference import Form, activate
from redline.units import round_up

FP8_MAX: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# Beyond these, rounding to the nearest would leave the format: what is cut off loses more than by rounding.
FP8_CUT: dict[torch.dtype, float] = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}
GEMM_MULTIPLE = FP8_MULTIPLES["delayed"]  # where a tensor has one scale


def padded(rows: int) -> int:
    """Tokens as a GEMM sums over them."""
    return round_up(rows, GEMM_MULTIPLE)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [...] times the one number of `scale`, saturated and rounded to nearest even, as `dtype`."""
    largest = FP8_MAX[dtype]
    return (x.float() * scale.float()).clamp(-largest, largest).to(dtype)


def transposed(q_TC: Tensor) -> Tensor:
    """[T, C] -> [C, T'] contiguous, T padded with zeros to what a GEMM sums over."""
    rows, cols = q_TC.shape
    q_CT = q_TC.new_zeros((cols, padded(rows)))
    q_CT[:, :rows] = q_TC.T
    return q_CT


def largest(x: Tensor, amax: Tensor) -> None:
    """amax = max(amax, max |x|), in place. NaN never counts, so that one cannot freeze a scale."""
    if x.numel():
        torch.fmax(amax, x.detach().abs().float().nan_to_num(nan=0.0, posinf=torch.inf).amax(), out=amax)


def gemm(a_MK: Tensor, b_NK: Tensor, a_inverse: Tensor, b_inverse: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a b^T of the values that two fp8 tensors stand for, summed in fp32: [M, K], [N, K] -> [M, N]."""
    return (a_MK.float() @ b_NK.float().T * (a_inverse * b_inverse)).to(out_dtype)


def cast(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """(q, q^T) of x [T, C]; what is not wanted is empty."""
    largest(x, amax)
    empty = x.new_empty(0, dtype=dtype)
    if not rows and not columns:
        return empty, empty
    q = quantize(x, scale, dtype)
    return (q if rows else empty), (transposed(q) if columns else empty)


def norm_cast(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, mean, rstd): the norm in fp32, rounded to x's dtype as a GEMM in bf16 would read it, then cast."""
    wide, gain = x.float(), weight.float() + zero_centered
    mean = wide.mean(-1) if layer else wide.new_empty(0)
    centred = wide - mean[:, None] if layer else wide
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[:, None] * gain
    if bias is not None:
        y = y + bias.float()
    q, _ = cast(y.to(x.dtype), scale, amax, dtype, True, False)
    return q, mean, rstd


def activation_cast(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    gated: bool,
    clamp: float | None,
    offset: float,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """q of the activation, rounded to x's dtype first."""
    wide = x.float() if bias is None else x.float() + bias.float()
    y = activate(wide, Form(kind, gated, clamp, offset))
    return cast(y.to(x.dtype), scale, amax, dtype, True, False)[0]


def activation_cast_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    kind: str,
    gated: bool,
    clamp: float | None,
    offset: float,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q of dx, its transpose, dbias), dx rounded to x's dtype first."""
    with torch.enable_grad():
        wide = (x.float() if bias is None else x.float() + bias.float()).requires_grad_()
        (dx,) = torch.autograd.grad(activate(wide, Form(kind, gated, clamp, offset)), wide, dy.float())
    dx = dx.to(x.dtype)
    q, qt = cast(dx, scale, amax, dtype, True, True)
    if bias is None:
        return q, qt, x.new_empty(0)
    dbias = dx.float().sum(0)
    if main_grad is None:
        return q, qt, dbias.to(bias.dtype)
    main_grad += dbias
    return q, qt, bias.new_empty(0)
