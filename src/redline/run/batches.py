"""Microbatches in the order the run consumes them, cut into steps and evaluations."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from redline.data import Microbatch, Source, prefetch
from redline.errors import DataError
from redline.plan import BatchSchedule

MARKED_SAMPLES = 8


def step_batches(
    source: Source, schedule: BatchSchedule, consumed_samples: int, *, num_workers: int, dp_rank: int = 0
) -> Generator[list[Microbatch], None, None]:
    """The microbatches of each step from `consumed_samples` on that are this rank's, made ahead of time.

    Microbatch number i of all ranks together is one run of samples, in the order of the ranks (Megatron's
    order). A generator: closing it stops the threads.
    """
    size = schedule.micro_batch_size

    def places() -> Iterator[tuple[int, int]]:
        for start, num_microbatches in _steps(schedule, consumed_samples):
            for index in range(num_microbatches):
                yield start + (index * schedule.dp + dp_rank) * size, size

    # A whole step is taken at once, so a step and what the threads are at must fit.
    depth = schedule.num_microbatches(consumed_samples) + 2 * num_workers
    with prefetch(source, places(), num_workers=num_workers, depth=depth) as microbatches:
        for _, num_microbatches in _steps(schedule, consumed_samples):
            yield [next(microbatches) for _ in range(num_microbatches)]


def _steps(schedule: BatchSchedule, consumed_samples: int) -> Iterator[tuple[int, int]]:
    """(samples consumed before it, microbatches) of each step to the end of the run."""
    while consumed_samples < schedule.total_samples:
        yield consumed_samples, schedule.num_microbatches(consumed_samples)
        consumed_samples += schedule.global_batch_size(consumed_samples)


def eval_batches(
    source: Source,
    num_samples: int,
    micro_batch_size: int,
    *,
    num_workers: int,
    dp: int = 1,
    dp_rank: int = 0,
) -> Generator[Microbatch, None, None]:
    """This rank's part of the first `num_samples` samples of a split: every evaluation sees the same ones."""
    first, stride = dp_rank * micro_batch_size, dp * micro_batch_size
    places = (
        (start, min(micro_batch_size, num_samples - start)) for start in range(first, num_samples, stride)
    )
    with prefetch(source, places, num_workers=num_workers) as microbatches:
        yield from microbatches


def mark_data(source: Source, consumed_samples: int) -> dict[str, Any]:
    """What a run has seen, by some of its samples: where they stand in its order, and what they hold.

    Of a cyclic source they lie in the last epoch's length: the order of an epoch is made as a whole.
    """
    span = min(consumed_samples, len(source))
    places = [consumed_samples - 1 - number * span // MARKED_SAMPLES for number in range(MARKED_SAMPLES)]
    return {"places": places, "digest": _digest(source, places)} if span else {}


def is_other_data(source: Source, mark: Mapping[str, Any]) -> bool:
    """Whether a run that goes on from a checkpoint has another order of samples than `mark_data` saw."""
    if not mark:  # of an earlier release, or before the first step
        return False
    try:
        return bool(_digest(source, mark["places"]) != mark["digest"])
    except DataError:  # fewer samples than that
        return True


def _digest(source: Source, places: Sequence[int]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for place in places:
        found.update(source.batch(place, 1).tokens_BS.numpy().tobytes())
    return found.hexdigest()
