"""fp8 casts and GEMMs as operators; `kernel` chooses between the Triton kernel and its plain twin.

None of these is differentiable: the sites of the model are, and call them with the tensors of each pass.
`scale`, `amax` and the inverse scales are one-element fp32 tensors on the device, views of the state's; casts
raise `amax` in place. Shapes are two-dimensional: T tokens, C the operand's other size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redline.kernels.activation_op import FORM
from redline.kernels.common import lazily, operator
from redline.kernels.fp8 import reference
from redline.kernels.fp8.reference import padded

Outputs = tuple[Tensor, Tensor, Tensor]


def _either(kernel: str, twin: Callable[..., Any]) -> Callable[..., Any]:
    """The Triton launcher of kernel.py or its plain twin, as the last argument of a call says."""
    launch = lazily("redline.kernels.fp8.kernel", kernel)

    def run(*args: Any) -> Any:
        *rest, by_kernel = args
        return (launch if by_kernel else twin)(*rest)

    return run


def _cast_fake(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool, kernel: bool
) -> tuple[Tensor, Tensor]:
    q = x.new_empty(x.shape if rows else (0,), dtype=dtype)
    return q, x.new_empty((x.shape[1], padded(x.shape[0])) if columns else (0,), dtype=dtype)


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


def _activation_cast_fake(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    gated: bool,
    clamp: float | None,
    offset: float,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if gated else x.shape[1]), dtype=dtype)


def _activation_backward_fake(
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
    kernel: bool,
) -> Outputs:
    wanted = bias is not None and main_grad is None
    transposed = x.new_empty((x.shape[1], padded(x.shape[0])), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), transposed, x.new_empty(x.shape[1] if wanted else 0)


def _gemm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    if not a.is_cuda:
        return reference.gemm(a, b, a_inverse, b_inverse, dtype)
    c: Tensor = torch._scaled_mm(a, b.T, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)
    return c


def gemm_into(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, out: Tensor, fast: bool) -> None:
    """As `gemm`, into a given tensor, whose rows may lie apart (the loss pads those of its logits)."""
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
    if overwrite:
        gemm_into(dyt, xt, dy_inverse, x_inverse, main_grad, False)
        return
    main_grad += _gemm(dyt, xt, dy_inverse, x_inverse, main_grad.dtype, False)


cast = operator(
    "fp8_cast(Tensor x, Tensor scale, Tensor(a!) amax, ScalarType dtype, bool rows, bool columns,"
    " bool kernel) -> (Tensor, Tensor)",
    _either("cast", reference.cast),
    _cast_fake,
)
transpose = operator(
    "fp8_transpose(Tensor q, bool kernel) -> Tensor",
    _either("transpose", reference.transposed),
    lambda q, kernel: q.new_empty((q.shape[1], padded(q.shape[0]))),
)
norm_cast = operator(
    "fp8_norm_cast(Tensor x, Tensor weight, Tensor? bias, bool layer, float eps, bool zero_centered,"
    " Tensor scale, Tensor(a!) amax, ScalarType dtype, bool kernel)"
    " -> (Tensor, Tensor, Tensor)",
    _either("norm_cast", reference.norm_cast),
    _norm_cast_fake,
)
activation_cast = operator(
    f"fp8_activation_cast(Tensor x, Tensor? bias, {FORM}, Tensor scale, Tensor(a!) amax,"
    " ScalarType dtype, bool kernel) -> Tensor",
    _either("activation_cast", reference.activation_cast),
    _activation_cast_fake,
)
activation_cast_backward = operator(
    f"fp8_activation_cast_bwd(Tensor dy, Tensor x, Tensor? bias, Tensor(a!)? main_grad, {FORM},"
    " Tensor scale, Tensor(b!) amax, ScalarType dtype, bool kernel) -> (Tensor, Tensor, Tensor)",
    _either("activation_cast_backward", reference.activation_cast_backward),
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
