"""Microbatches by the number of samples consumed so far.

A source has no cursor: `batch(start, count)` is a pure function, so a run resumes from one number whatever
its micro-batch size, gradient accumulation or number of loader threads was before.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from redline.data.microbatch import Microbatch
from redline.data.samples import Samples
from redline.errors import DataError


class Format(Protocol):
    """How rows become model input: `BatchFormat`, `PackedFormat`."""

    def microbatch(self, rows: NDArray[np.int64], sample_index: NDArray[np.int64]) -> Microbatch:
        """Rows of samples, and their numbers in training order."""
        ...


class Source:
    """The samples of one split, in training order.

    Args:
        samples: rows by number.
        format: how a row becomes model input.
        cyclic: draw every epoch of `samples` in a new random order, without end (`--dataloader-type cyclic`);
            else in the given order, once (`single`).
    """

    def __init__(self, samples: Samples, format: Format, *, cyclic: bool = False) -> None:
        self.samples, self.format, self.cyclic = samples, format, cyclic
        # Two epochs meet at most in one microbatch; the loader's threads share the cache.
        self._permutation = functools.lru_cache(maxsize=2)(functools.partial(_permutation, len(samples)))

    def __len__(self) -> int:
        """Distinct samples; `single` ends here, `cyclic` begins its next epoch."""
        return len(self.samples)

    def batch(self, start: int, count: int) -> Microbatch:
        """Samples start .. start + count of the training order.

        Raises: DataError past the end of a `single` source, or for a token outside the vocabulary.
        """
        if not self.cyclic and not 0 <= start <= start + count <= len(self):
            raise DataError(
                f"samples {start} to {start + count} were asked for, but this split holds {len(self)}.",
                why="the sample order was built for the number of samples that the run announced.",
                mend="raise --train-samples (or --train-iters) to what the run consumes.",
            )
        consumed = np.arange(start, start + count, dtype=np.int64)
        numbers = self._cycled(consumed) if self.cyclic else consumed
        return self.format.microbatch(self.samples.rows(numbers), consumed)

    def _cycled(self, consumed: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(consumed, len(self))
        numbers = np.empty_like(consumed)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            numbers[mine] = self._permutation(epoch)[places[mine]]
        return numbers


def _permutation(size: int, epoch: int) -> NDArray[np.int64]:
    """One epoch of the cyclic loader: torch's permutation seeded by the epoch, as in Megatron-LM."""
    import torch

    numbers: NDArray[np.int64] = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).numpy()
    return numbers
