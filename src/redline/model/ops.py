"""The functions a model computes with, in one frozen record: an implementation is swapped by one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from redline.model import gemm, local, rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of every operation outside attention.

    Each takes and returns what the plain function of the same name does: `linear` is that of gemm.py,
    `rope` that of rope.py, the others those of local.py (`qk_norm` as `norm`, on the rows of single heads).
    """

    linear: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    qk_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    activation: Callable[..., Tensor]
    bias_dropout_add: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]


def local_ops(*, fuse_wgrad: bool = True) -> Ops:
    """Plain PyTorch throughout.

    Args:
        fuse_wgrad: whether a GEMM adds its weight gradient to `main_grad` itself
            (`--gradient-accumulation-fusion`).
    """
    return Ops(
        linear=partial(gemm.linear, fuse_wgrad=fuse_wgrad),
        norm=local.norm,
        qk_norm=local.norm,
        rope=rope.rope,
        activation=local.activation,
        bias_dropout_add=local.bias_dropout_add,
        cross_entropy=local.cross_entropy,
    )
