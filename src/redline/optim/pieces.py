"""The part of a parameter that one rank holds: stretches of its elements, counted row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some elements of a tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of the elements.
        parts: (first element, [n] the elements from there on), ascending, each within the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[tuple[int, Tensor], ...]

    def cut(self, first: int, shape: torch.Size) -> Pieces:
        """The same memory, as part of the tensor of `shape` that lies at element `first` of this one."""
        last = first + shape.numel()
        found = []
        for start, part in self.parts:
            low, high = max(start, first), min(start + part.numel(), last)
            if low < high:
                found.append((low - first, part[low - start : high - start]))
        return Pieces(shape, self.dtype, tuple(found))

    def rectangles(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """(offset, piece) of each rectangle of the whole tensor that its elements are, as views of them."""
        for start, part in self.parts:
            taken = 0
            for offset, size in rectangles(tuple(self.shape), start, start + part.numel()):
                count = math.prod(size)
                yield offset, part[taken : taken + count].view(size)
                taken += count

    def fill(self, whole: Tensor) -> None:
        """Take over these elements of `whole`."""
        flat = whole.reshape(-1)
        for start, part in self.parts:
            part.copy_(flat[start : start + part.numel()])


def pieces_of(
    shape: torch.Size, dtype: torch.dtype, start: int, held: Sequence[tuple[int, Tensor]]
) -> Pieces:
    """What of the parameter of `shape` at element `start` of a flat buffer is among the windows `held`.

    Args:
        held: (first element of the flat buffer, [n] its elements from there on).
    """
    buffer = Pieces(torch.Size([0]), dtype, tuple(held))
    return buffer.cut(start, shape)


def rectangles(
    shape: tuple[int, ...], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, size) of elements start .. end of a vector or a row-major matrix, in their order.

    At most three: the rest of a row, whole rows, the begin of a row.
    """
    assert len(shape) in (1, 2), shape
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    columns = shape[1]
    while start < end:
        row, column = divmod(start, columns)
        rows = (end - start) // columns
        if column == 0 and rows:
            yield (row, 0), (rows, columns)
            start += rows * columns
        else:
            length = min(end - start, columns - column)
            yield (row, column), (1, length)
            start += length
