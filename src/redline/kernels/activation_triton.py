"""Where the activation operator's launches go: gated or not."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.gated_triton import gated_backward, gated_forward
from redline.kernels.ungated_triton import ungated_backward, ungated_forward


def forward(
    x: Tensor, bias: Tensor | None, kind: str, gated: bool, clamp: float | None, offset: float
) -> Tensor:
    """x [..., F] or, gated, [..., 2F], bias as long or None -> y [..., F]."""
    return gated_forward(x, bias, kind, clamp, offset) if gated else ungated_forward(x, bias, kind)


def backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, main_grad: Tensor | None, kind: str, gated: bool,
    clamp: float | None, offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx, dbias) as x and bias; dbias is empty without a bias, and where it was added to main_grad."""
    if gated:
        return gated_backward(dy, x, bias, main_grad, kind, clamp, offset)
    return ungated_backward(dy, x, bias, main_grad, kind)
