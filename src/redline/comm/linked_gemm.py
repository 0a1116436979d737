"""GEMMs joined to a collective along the tokens: gather + GEMM and GEMM + scatter, several providers.

    gather_gemm   y = gather(x_shard) w       [T/tp, K], [K, N] -> y [T, N] and the gathered x [T, K]
    gemm_scatter  y_shard = scatter(x w)      [T, K], [K, N] -> [T/tp, N], summed over the ranks

Which one runs is an object that a GEMM site is handed: `Plain` (one after the other), `Chunked` (pieces
travel while others are multiplied, on any device), `Pushed` (pushed.py: copies into each other's memory),
`SymmetricMemory` (symmetric.py: PyTorch's own, over NVLink). The same object sends what travels behind a GEMM
of something else (`gather`, `scatter`). Where rows travel as other bytes than a GEMM's result has, as they do
in fp8, `Plain` and `Chunked` take any `Product` in the matrix's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from redline.comm.collectives import (
    Pending,
    all_gather,
    all_gather_async,
    check_even,
    exchange_async,
    reduce_scatter,
    reduce_scatter_async,
    reduce_scatter_into_async,
)
from redline.comm.groups import Group


class LinkedGemm(Protocol):
    """A provider. Operands are contiguous matrices of one dtype; `w` may be a transposed view."""

    @property
    def name(self) -> str:
        """As a run's record shows it."""

    def gather_gemm(self, x_shard: Tensor, w: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """(gather(x_shard) w, gather(x_shard))."""

    def gemm_scatter(self, x: Tensor, w: Tensor, group: Group) -> Tensor:
        """This rank's rows of the sum over ranks of x w. Raises: ShapeError when the rows do not divide."""

    def gather(self, x_shard: Tensor, group: Group) -> Pending:
        """All ranks' rows, on their way while something else is computed."""

    def scatter(self, x: Tensor, group: Group) -> Pending:
        """This rank's rows of the sum over ranks of x, likewise. Raises: ShapeError as above."""


@dataclass(frozen=True, slots=True)
class Product:
    """What rows are multiplied by.

    Attributes:
        into: writes the product of rows [R, K], of whatever dtype travels, into a contiguous [R, columns].
        columns, dtype: of the result.
    """

    into: Callable[[Tensor, Tensor], object]
    columns: int
    dtype: torch.dtype

    def empty(self, x: Tensor, rows: int) -> Tensor:
        """Room for the product of so many rows, on the device of `x`."""
        return x.new_empty(rows, self.columns, dtype=self.dtype)


def matrix(w: Tensor) -> Product:
    """The product with `w` [K, N]."""
    return Product(lambda x, y: torch.mm(x, w, out=y), w.shape[1], w.dtype)


class Bulk:
    """Gathers and scatters beside a GEMM that they have nothing to do with: the library's collectives."""

    __slots__ = ()

    def gather(self, x_shard: Tensor, group: Group) -> Pending:
        """See LinkedGemm."""
        return all_gather_async(x_shard, group)

    def scatter(self, x: Tensor, group: Group) -> Pending:
        """See LinkedGemm."""
        return reduce_scatter_async(x, group)


@dataclass(frozen=True, slots=True)
class Plain(Bulk):
    """The collective, then the GEMM; or the other way round."""

    name: str = "plain"

    def gather_gemm(self, x_shard: Tensor, w: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        x = all_gather(x_shard, group)
        return x @ w, x

    def gemm_scatter(self, x: Tensor, w: Tensor, group: Group) -> Tensor:
        return reduce_scatter(x @ w, group)

    def gather_product(self, x_shard: Tensor, by: Product, group: Group) -> tuple[Tensor, Tensor]:
        """`gather_gemm` by anything: (the product of gather(x_shard), gather(x_shard))."""
        x = all_gather(x_shard, group)
        y = by.empty(x, len(x))
        by.into(x, y)
        return y, x

    def product_scatter(self, x: Tensor, by: Product, group: Group) -> Tensor:
        """`gemm_scatter` by anything: this rank's rows of the sum over ranks of the products of x."""
        y = by.empty(x, len(x))
        by.into(x, y)
        return reduce_scatter(y, group)


@dataclass(frozen=True, slots=True)
class Chunked(Bulk):
    """Pieces of each rank's rows travel while others are multiplied.

    gather_gemm sends the own rows, piece by piece, to every rank, and multiplies them meanwhile; then pieces
    of the others as they come. Everything is hidden but what the own rows' GEMM does not cover.
    gemm_scatter multiplies a piece of every rank's rows, sends it to be summed, and multiplies the next: the
    last piece is in the open.

    Attributes:
        chunks: pieces of a rank's rows; more hide more, and make smaller GEMMs.
    """

    chunks: int = 2

    @property
    def name(self) -> str:
        """With its number of pieces."""
        return f"chunked ({self.chunks})"

    def gather_gemm(self, x_shard: Tensor, w: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        return self.gather_product(x_shard, matrix(w), group)

    def gather_product(self, x_shard: Tensor, by: Product, group: Group) -> tuple[Tensor, Tensor]:
        """`gather_gemm` by anything: (the product of gather(x_shard), gather(x_shard))."""
        rows, size = x_shard.shape[0], group.size
        x, y = x_shard.new_empty(size * rows, x_shard.shape[1]), by.empty(x_shard, size * rows)
        parts, results = x.view(size, rows, -1), y.view(size, rows, -1)
        others = [(group.index + step) % size for step in range(1, size)]
        pieces = list(self._pieces(rows))
        travelling = [
            exchange_async(
                [(rank, x_shard[piece]) for rank in others],
                [(rank, parts[rank, piece]) for rank in others],
                group,
            )
            for piece in pieces
        ]
        by.into(x_shard, results[group.index])
        parts[group.index].copy_(x_shard)
        for piece, work in zip(pieces, travelling, strict=True):
            Pending(x, work, pace=group.pace).wait()
            for rank in others:
                by.into(parts[rank, piece], results[rank, piece])
        return y, x

    def gemm_scatter(self, x: Tensor, w: Tensor, group: Group) -> Tensor:
        return self.product_scatter(x, matrix(w), group)

    def product_scatter(self, x: Tensor, by: Product, group: Group) -> Tensor:
        """`gemm_scatter` by anything: this rank's rows of the sum over ranks of the products of x."""
        check_even(x, group)
        size, rows = group.size, x.shape[0] // group.size
        parts, y = x.view(size, rows, -1), by.empty(x, rows)
        travelling = []
        for piece in self._pieces(rows):
            length = piece.stop - piece.start
            products = by.empty(x, size * length)
            for rank in range(size):
                by.into(parts[rank, piece], products[rank * length : (rank + 1) * length])
            travelling.append(reduce_scatter_into_async(y[piece], products, group))
        for each in travelling:
            each.wait()
        return y

    def _pieces(self, rows: int) -> Iterator[slice]:
        """Equal pieces of a rank's rows, the last one perhaps shorter."""
        length = -(-rows // self.chunks)
        for start in range(0, rows, length):
            yield slice(start, min(start + length, rows))
