"""Initial weights: each logical tensor is a function of (seed, its name), whatever stores it.

So q is the same whether it lies in a merged matrix or alone, an embedding whatever its padding, and a slice
of a tensor-parallel rank is that slice of the whole. The distributions are Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from redline.formulas.shape import ModelShape, TpRank
from redline.model.random import fill_normal_
from redline.model.shard_table import WHOLE, check_names, logical_tensors, parts_of
from redline.rng import stream_key


def init_parameters(model: nn.Module, shape: ModelShape, seed: int, rank: TpRank = WHOLE) -> None:
    """Draw every parameter of `model`, which has storage by now, on the device where it lies."""
    named = dict(model.named_parameters())
    check_names(named, shape)
    init_tensors(named.items(), shape, seed, rank)


@torch.no_grad()
def init_tensors(
    named: Iterable[tuple[str, Tensor]], shape: ModelShape, seed: int, rank: TpRank = WHOLE
) -> None:
    """Draw these parameters, or their main copies: one draw, rounded to the dtype of each tensor.

    Args:
        named: (parameter name, contiguous tensor of its shape).
        rank: which slices of the logical tensors these are.

    Norms begin as the identity, biases at 0, matrices and embeddings as N(0, std^2). The two matrices of a
    layer that write into the residual stream have std / sqrt(2 L), so its variance does not grow with
    depth. Attention sinks are N(0, std^2) too. Padded rows of the vocabulary are 0.
    """
    for name, physical in named:
        physical.zero_()
        views = logical_tensors(name, physical, shape, rank)
        for part in parts_of(name, shape, rank):
            logical, view = part.tensor.name, views[part.tensor.name]
            if logical.endswith("norm.weight"):
                view.fill_(0.0 if shape.zero_centered_gamma else 1.0)
            elif logical.endswith((".weight", ".sink")):
                key, columns = stream_key(seed, "init", logical), part.tensor.size[-1]
                offset = (0, *part.held.offset)[-2:]  # a vector is one row
                fill_normal_(view, _std(logical, shape), key, offset, columns)


def _std(logical: str, shape: ModelShape) -> float:
    """The standard deviation of a matrix."""
    if logical.startswith("embedding."):
        return shape.embedding_init_std
    if logical.endswith((".proj.weight", ".down.weight")):
        return shape.init_std / math.sqrt(2 * shape.num_layers)
    return shape.init_std
