"""The functions a model computes with, in one frozen record: an implementation is swapped by one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from redline.model import gemm, local, rope

Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of every operation outside attention.

    Each takes and returns what the plain function of the same name does: `linear` is that of gemm.py, `rope`
    and `rope_qkv` those of rope.py, the others those of local.py. Where a parameter has a `main_grad`, its
    gradient is added there. `row_linear` is the GEMM that reads what `linear` of another matrix made: under
    tensor parallelism `linear` has some output features on each rank, `row_linear` some input features.
    `residual_norm`, where there is one, is the norm of the blocks: of (y or None, x) it makes h = x + y, and
    returns (norm(h), h).
    """

    embedding: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    row_linear: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    qk_norm: Callable[..., Three]
    rope: Callable[..., tuple[Tensor, Tensor]]
    rope_qkv: Callable[..., Three]
    activation: Callable[..., Tensor]
    bias_dropout_add: Callable[..., Tensor]
    dropout: Callable[..., Tensor]
    head_loss: Callable[..., Tensor]
    residual_norm: Callable[..., tuple[Tensor, Tensor]] | None = None


def local_ops(*, fuse_wgrad: bool = True) -> Ops:
    """Plain PyTorch throughout.

    Args:
        fuse_wgrad: whether a GEMM adds its weight gradient to `main_grad` itself
            (`--gradient-accumulation-fusion`).
    """
    linear = partial(gemm.linear, fuse_wgrad=fuse_wgrad)
    return Ops(
        embedding=local.embedding,
        linear=linear,
        row_linear=linear,
        norm=local.norm,
        qk_norm=local.qk_norm,
        rope=rope.rope,
        rope_qkv=rope.rope_qkv,
        activation=local.activation,
        bias_dropout_add=local.bias_dropout_add,
        dropout=local.dropout,
        head_loss=partial(local.head_loss, linear=linear),
    )
