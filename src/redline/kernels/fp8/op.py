"""fp8 casts and GEMMs as operators; `kernel` chooses between the Triton kernel and its plain twin.

None of these is differentiable: the sites of the model are, and call them with the tensors of each pass.
`scale`, `amax` and the inverse scales are one-element fp32 tensors on the device, views of the state's; casts
raise `amax` in place. Shapes are two-dimensional: T tokens, C the operand's other size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.common import ceil_div, lazily, operator
from redline.kernels.fp8 import reference
from redline.kernels.fp8.reference import GEMM_MULTIPLE

Outputs = tuple[Tensor, Tensor, Tensor]

_cast_kernel = lazily("redline.kernels.fp8.kernel", "cast")
_transpose_kernel = lazily("redline.kernels.fp8.kernel", "transpose")
_norm_cast_kernel = lazily("redline.kernels.fp8.kernel", "norm_cast")
_activation_cast_kernel = lazily("redline.kernels.fp8.kernel", "activation_cast")
_activation_backward_kernel = lazily("redline.kernels.fp8.kernel", "activation_cast_backward")


def _cast(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool, kernel: bool
) -> tuple[Tensor, Tensor]:
    run = _cast_kernel if kernel else reference.cast
    outputs: tuple[Tensor, Tensor] = run(x, scale, amax, dtype, rows, columns)
    return outputs


def _cast_fake(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool, kernel: bool
) -> tuple[Tensor, Tensor]:
    q = x.new_empty(x.shape if rows else (0,), dtype=dtype)
    return q, x.new_empty((x.shape[1], _padded(x.shape[0])) if columns else (0,), dtype=dtype)


def _transpose(q: Tensor, kernel: bool) -> Tensor:
    qt: Tensor = (_transpose_kernel if kernel else reference.transposed)(q)
    return qt


def _norm_cast(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Outputs:
    run = _norm_cast_kernel if kernel else reference.norm_cast
    outputs: Outputs = run(x, weight, bias, layer, eps, zero_centered, scale, amax, dtype)
    return outputs


def _norm_cast_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Outputs:
    rows = x.shape[0]
    mean, rstd = (x.new_empty(size, dtype=torch.float32) for size in (rows if layer else 0, rows))
    return x.new_empty(x.shape, dtype=dtype), mean, rstd


def _activation_cast(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    gated: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    run = _activation_cast_kernel if kernel else reference.activation_cast
    q: Tensor = run(x, bias, kind, gated, scale, amax, dtype)
    return q


def _activation_cast_fake(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    gated: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if gated else x.shape[1]), dtype=dtype)


def _activation_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    kind: str,
    gated: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Outputs:
    run = _activation_backward_kernel if kernel else reference.activation_cast_backward
    outputs: Outputs = run(dy, x, bias, main_grad, kind, gated, scale, amax, dtype)
    return outputs


def _activation_backward_fake(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    kind: str,
    gated: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Outputs:
    wanted = bias is not None and main_grad is None
    transposed = x.new_empty((x.shape[1], _padded(x.shape[0])), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), transposed, x.new_empty(x.shape[1] if wanted else 0)


def _gemm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    if not a.is_cuda:
        return reference.gemm(a, b, a_inverse, b_inverse, dtype)
    c: Tensor = torch._scaled_mm(a, b.T, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)
    return c


def gemm_into(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, out: Tensor, fast: bool) -> None:
    """As `gemm`, into a given contiguous tensor."""
    if a.is_cuda:
        torch._scaled_mm(a, b.T, a_inverse, b_inverse, out_dtype=out.dtype, use_fast_accum=fast, out=out)
    else:
        out.copy_(reference.gemm(a, b, a_inverse, b_inverse, out.dtype))


def _gemm_fake(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _add_wgrad(
    main_grad: Tensor, dyt: Tensor, xt: Tensor, dy_inverse: Tensor, x_inverse: Tensor, overwrite: bool
) -> None:
    if overwrite and main_grad.is_cuda:
        torch._scaled_mm(dyt, xt.T, dy_inverse, x_inverse, out_dtype=main_grad.dtype, out=main_grad)
        return
    main_grad += _gemm(dyt, xt, dy_inverse, x_inverse, main_grad.dtype, False)


cast = operator(
    "fp8_cast(Tensor x, Tensor scale, Tensor(a!) amax, ScalarType dtype, bool rows, bool columns,"
    " bool kernel) -> (Tensor, Tensor)",
    _cast,
    _cast_fake,
)
transpose = operator(
    "fp8_transpose(Tensor q, bool kernel) -> Tensor",
    _transpose,
    lambda q, kernel: q.new_empty((q.shape[1], _padded(q.shape[0]))),
)
norm_cast = operator(
    "fp8_norm_cast(Tensor x, Tensor weight, Tensor? bias, bool layer, float eps, bool zero_centered,"
    " Tensor scale, Tensor(a!) amax, ScalarType dtype, bool kernel)"
    " -> (Tensor, Tensor, Tensor)",
    _norm_cast,
    _norm_cast_fake,
)
activation_cast = operator(
    "fp8_activation_cast(Tensor x, Tensor? bias, str kind, bool gated, Tensor scale, Tensor(a!) amax,"
    " ScalarType dtype, bool kernel) -> Tensor",
    _activation_cast,
    _activation_cast_fake,
)
activation_cast_backward = operator(
    "fp8_activation_cast_bwd(Tensor dy, Tensor x, Tensor? bias, Tensor(a!)? main_grad, str kind, bool gated,"
    " Tensor scale, Tensor(b!) amax, ScalarType dtype, bool kernel) -> (Tensor, Tensor, Tensor)",
    _activation_backward,
    _activation_backward_fake,
)
gemm = operator(
    "fp8_gemm(Tensor a, Tensor b, Tensor a_inverse, Tensor b_inverse, ScalarType dtype, bool fast) -> Tensor",
    _gemm,
    _gemm_fake,
)
add_wgrad = operator(
    "fp8_add_wgrad(Tensor(a!) main_grad, Tensor dyt, Tensor xt, Tensor dy_inverse, Tensor x_inverse,"
    " bool overwrite) -> ()",
    _add_wgrad,
    lambda *_: None,
)


def _padded(rows: int) -> int:
    return ceil_div(rows, GEMM_MULTIPLE) * GEMM_MULTIPLE
