"""The parts of a block that own parameters, and the site that joins two of them around a GEMM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.formulas.shape import ModelShape
from redline.model.local import Affine
from redline.model.recompute import rebuilt


def parameter(*size: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of this size without memory: storage comes later, as a view of a flat buffer."""
    return nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))


class Linear(nn.Module):
    """A GEMM with its weight [O, I] and, with `bias`, a bias [O]: y = x W^T + b.

    With `defer_bias` the product is returned bare and whoever comes next adds `self.bias`, in one pass with
    its own work.

    Args:
        size_in, size_out: I and O, of the part held here.
        linear: the GEMM: `ops.linear`, or `ops.row_linear`.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        bias: bool,
        linear: Callable[..., Tensor],
        dtype: torch.dtype,
        defer_bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = parameter(size_out, size_in, dtype=dtype)
        self.bias = parameter(size_out, dtype=dtype) if bias else None
        self._linear, self.defer_bias = linear, defer_bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._linear(x, self.weight, None if self.defer_bias else self.bias)


class Norm(nn.Module):
    """The model's normalisation over the last dimension, with its gain and, for LayerNorm, its bias.

    Without `affine` it has no parameters (the L2 norm of queries and keys).
    """

    def __init__(
        self,
        size: int,
        *,
        shape: ModelShape,
        norm: Callable[..., Tensor],
        dtype: torch.dtype,
        affine: bool = True,
        residual_norm: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        kind = shape.normalization if affine else "RMSNorm"
        self.weight = parameter(size, dtype=dtype) if affine else None
        self.bias = parameter(size, dtype=dtype) if kind == "LayerNorm" else None
        self.form: dict[str, Any] = {
            "kind": kind,
            "epsilon": shape.norm_epsilon,
            "zero_centered": shape.zero_centered_gamma,
            "dtype": dtype,
        }
        self._norm, self._residual_norm = norm, residual_norm

    @property
    def affine(self) -> Affine:
        """Its parameters."""
        return Affine(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] of any float dtype -> [..., C] in the compute dtype."""
        return self._norm(x, *self.affine, **self.form)

    @property
    def hands_on(self) -> bool:
        """Whether it hands on the residual stream: `split` then stands for `forward`."""
        return self._residual_norm is not None

    def split(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(h), h) with h = x + y: [..., C] twice. One kernel adds their two gradients."""
        assert self._residual_norm is not None
        return self._residual_norm(y, x, *self.affine, **self.form)


@dataclass(frozen=True, slots=True)
class Activation:
    """The MLP's nonlinearity, with the bias that the GEMM before it deferred.

    Attributes:
        form: kind, clamp and offset, as `local.activation` takes them.
    """

    before: Linear
    activation: Callable[..., Tensor]
    form: Mapping[str, Any]

    def __call__(self, y_SBF: Tensor) -> Tensor:
        return self.activation(y_SBF, self.before.bias, **self.form)


@dataclass(frozen=True, slots=True)
class Site:
    """A GEMM and what runs just before it: the unit that fusion, fp8, recompute and overlap work on.

    It owns nothing: the parameters stay in the modules it calls. An implementation that fuses both replaces
    the Site by its own object and decides what is saved for backward.

    Attributes:
        rebuild: keep the prologue's input for backward and not its output, which is made again just before
            the weight gradient's GEMM reads it (`--recompute-modules layernorm activation`).
    """

    prologue: Callable[[Tensor], Tensor] | None
    gemm: Linear
    rebuild: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.rebuild and self.prologue is not None:
            return rebuilt(self.prologue, x, self.gemm)
        y: Tensor = self.gemm(x if self.prologue is None else self.prologue(x))
        return y
