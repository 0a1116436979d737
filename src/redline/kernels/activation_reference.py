"""The activations in plain PyTorch: the twin that the activation rooms, the casts to fp8 and the plain
model share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.common import compute_dtype


class Form(NamedTuple):
    """What a kernel computes of y = x + bias.

    Attributes:
        kind: the curve, one of CURVES.
        gated: y is [gate | up], and the result curve(gate) * (up + offset).
        clamp: limit of gate from above and of up on both sides; beyond it the gradient is 0.
    """

    kind: str
    gated: bool = False
    clamp: float | None = None
    offset: float = 0.0


# GELU: Hendrycks and Gimpel 2016, arXiv 1606.08415, by erf, by tanh or by a sigmoid.
CURVES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "exact": torch.nn.functional.gelu,
    "tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: torch.relu(x).square(),
}


def activate(x: Tensor, form: Form) -> Tensor:
    """[..., F] -> [..., F] or, gated, [..., 2F] -> [..., F], in x's dtype."""
    if not form.gated:
        return CURVES[form.kind](x)
    gate, up = x.chunk(2, dim=-1)
    if form.clamp is not None:
        gate, up = gate.clamp(max=form.clamp), up.clamp(-form.clamp, form.clamp)
    return CURVES[form.kind](gate) * (up + form.offset if form.offset else up)


def bias_activation_reference(x: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """`activate` of x + bias in x's dtype: fp32 inside, rounded once. The bias is as long as x's last dim."""
    wide = x.to(compute_dtype(x))
    return activate(wide if bias is None else wide + bias, form).to(x.dtype)
