"""Which logical tensors a parameter stores, and how tensor parallelism splits it.

Checkpoints, formulas and initialisation speak of logical tensors: q, k, v, gate and up apart, the
vocabulary at its true size (formulas/params.py lists them). The model stacks some in one matrix for one
GEMM, and pads the vocabulary; the padded rows belong to no logical tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from redline.errors import ShapeError
from redline.formulas.params import LogicalTensor, Shared, Slice, Split, rank_slice, shares_group
from redline.formulas.params import logical_tensors as list_logical_tensors
from redline.formulas.shape import ModelShape, TpRank

# Logical name -> the parameter that stores it; parts are stacked by rows in this order. All others store
# themselves.
STACKED = (
    (re.compile(r"\.attention\.(q|k|v)\.(weight|bias)$"), r".attention.qkv.\2"),
    (re.compile(r"\.mlp\.(gate|up)\.(weight|bias)$"), r".mlp.fc1.\2"),
    (re.compile(r"\.mlp\.(down)\.(weight|bias)$"), r".mlp.fc2.\2"),
)
_IN_HEADS = re.compile(r"\.attention\.[qk]_norm\.")
WHOLE = TpRank()


@dataclass(frozen=True, slots=True)
class Stored:
    """One parameter of the model.

    Attributes:
        split: how ranks share it: "column" splits the rows of each part (output features), "row" the
            columns (input features), "vocab" the rows with their padding; a "replicated" one is whole on
            every rank.
        parts: the logical tensors in it, from the first row on.
    """

    split: Split
    parts: tuple[LogicalTensor, ...]


@lru_cache(maxsize=64)
def shard_table(shape: ModelShape) -> dict[str, Stored]:
    """Every parameter of a model of this shape, by name."""
    table: dict[str, Stored] = {}
    for tensor in list_logical_tensors(shape):
        name = tensor.name
        for pattern, parameter in STACKED:
            name = pattern.sub(parameter, name)
        before = table[name].parts if name in table else ()
        table[name] = Stored(tensor.split, (*before, tensor))
    return table


@dataclass(frozen=True, slots=True)
class Part:
    """A logical tensor inside a parameter, or the slice of it that this rank holds there.

    Attributes:
        tensor: the whole.
        held: which part of it this is.
        start: the parameter's row at which it begins; it has held.size[0] rows.
    """

    tensor: LogicalTensor
    held: Slice
    start: int


@lru_cache(maxsize=256)
def parts_of(name: str, shape: ModelShape, rank: TpRank = WHOLE) -> tuple[Part, ...]:
    """What parameter `name` holds on one tensor-parallel rank, row by row; padding is left out."""
    parts, start = [], 0
    for tensor in shard_table(shape)[name].parts:
        held = rank_slice(tensor, shape, rank)
        if held.numel:
            parts.append(Part(tensor, held, start))
        start += held.size[0]
    return tuple(parts)


def logical_tensors(
    name: str, physical: Tensor, shape: ModelShape, rank: TpRank = WHOLE
) -> dict[str, Tensor]:
    """The logical tensors inside parameter `name`, as views, by logical name.

    Args:
        physical: the parameter, or anything of its shape (its main copy, gradient or moments).
        rank: on several tensor-parallel ranks the views are the slices that this one holds.

    Raises: ShapeError when the model has no such parameter, or `physical` does not have its shape.
    """
    if name not in shard_table(shape):
        raise ShapeError(f"a model of this shape has no parameter {name}.")
    views: dict[str, Tensor] = {}
    for part in parts_of(name, shape, rank):
        size = part.held.size
        view = views[part.tensor.name] = physical[part.start : part.start + size[0]]
        if view.shape != size:
            raise ShapeError(
                f"{name} of shape {tuple(physical.shape)} cannot hold {part.tensor.name} of shape {size}.",
                why="the model's shape says otherwise.",
            )
    return views


def shared_parameters(shape: ModelShape, rank: TpRank, *, sequence: bool) -> dict[str, Shared]:
    """The parameters of which other tensor-parallel ranks hold something too; none on one rank.

    Args:
        sequence: whether the ranks share the sequence: then every gradient of a replicated parameter is the
            sum over a part of the tokens. Without, only those of q and k norms are partial: over some heads.
    """
    if rank.size == 1:
        return {}
    found = {}
    for name in shard_table(shape):
        copies, partial, size = [], [], 0
        for part in parts_of(name, shape, rank):
            row = part.tensor.numel // part.tensor.size[0]
            start, numel = part.start * row, part.held.numel
            if part.tensor.split == "replicated":
                first = 0
                sums = sequence or _IN_HEADS.search(name) is not None
            elif shares_group(part.tensor, shape, rank.size):
                holders, sums = rank.size // shape.num_groups, True
                first = rank.index // holders * holders
            else:
                continue
            if rank.index != first:
                copies.append((start, start + numel))
            if sums:
                partial.append((start, start + numel, size + part.held.offset[0] * row))
                size += part.tensor.numel
        if copies or partial:
            found[name] = Shared(tuple(copies), tuple(partial), size)
    return found


def padding_of(parameters: Iterable[tuple[str, Tensor]], shape: ModelShape, rank: TpRank) -> dict[str, int]:
    """By name, elements of a parameter that belong to no logical tensor; those without are left out."""
    found = {
        name: parameter.numel() - sum(part.held.numel for part in parts_of(name, shape, rank))
        for name, parameter in parameters
    }
    return {name: count for name, count in found.items() if count}


def check_names(names: Iterable[str], shape: ModelShape) -> None:
    """Raises ShapeError unless the table and the model list the same parameters."""
    have, want = set(names), set(shard_table(shape))
    if have != want:
        raise ShapeError(
            "the model and its shard table differ.",
            why=f"only in the model: {sorted(have - want)}; only in the table: {sorted(want - have)}.",
        )
