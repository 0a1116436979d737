"""Reading ahead: microbatches are made by threads while the model computes.

Threads suffice: the work is NumPy copies that release the interpreter's lock, and page faults of mapped
files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

from redline.data.microbatch import Microbatch


class Batches(Protocol):
    """Anything with `batch(start, count)`: a `Source`."""

    def batch(self, start: int, count: int) -> Microbatch:
        """Samples start .. start + count."""
        ...


class Prefetcher(Iterator[Microbatch]):
    """Yields `source.batch(*step)` for each step of `plan`, in order, made ahead of time.

    An exception of the source or of the plan is raised at the step that caused it, once what came before it
    has been handed out; the threads are then stopped. Leaving the `with` block (or `close`) stops them at any
    time.

    Args:
        source: where microbatches come from.
        plan: (start, count) pairs; it may be endless, it is read no further than `depth` ahead.
        num_workers: threads (`--num-workers`); 0 makes each microbatch when it is asked for.
        depth: microbatches kept ready; None for two per thread.
    """

    def __init__(
        self,
        source: Batches,
        plan: Iterable[tuple[int, int]],
        *,
        num_workers: int = 2,
        depth: int | None = None,
    ) -> None:
        self._source, self._plan = source, iter(plan)
        self._depth = max(2 * num_workers if depth is None else depth, 1)
        self._pool = ThreadPoolExecutor(num_workers, "redline-data") if num_workers else None
        self._ready: deque[Future[Microbatch]] = deque()
        self._plan_error: Exception | None = None
        self._fill()

    def __next__(self) -> Microbatch:
        if self._pool is None:
            return self._source.batch(*next(self._plan))
        if not self._ready:
            self.close()
            if self._plan_error is not None:
                raise self._plan_error
            raise StopIteration
        try:
            batch = self._ready.popleft().result()
        except BaseException:
            self.close()
            raise
        self._fill()
        return batch

    def close(self) -> None:
        """Drop what was made ahead and wait for the threads to end."""
        if self._pool is not None:
            self._ready.clear()
            self._plan = iter(())
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self) -> None:
        while self._pool is not None and len(self._ready) < self._depth:
            try:
                step = next(self._plan)
            except StopIteration:
                return
            except Exception as error:  # raised in its turn
                self._plan_error, self._plan = error, iter(())
                return
            self._ready.append(self._pool.submit(self._source.batch, *step))


def prefetch(
    source: Batches, plan: Iterable[tuple[int, int]], *, num_workers: int = 2, depth: int | None = None
) -> Prefetcher:
    """A `Prefetcher` that has begun; use it in a `with` block."""
    return Prefetcher(source, plan, num_workers=num_workers, depth=depth)
