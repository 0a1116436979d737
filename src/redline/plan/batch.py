"""How many sequences a step takes, as a function of the sequences consumed so far.

A schedule is a list of segments, each a batch size from some number of consumed samples on; constant, ramp-up
and token-threshold schedules are only different ways to write that list. A step never changes its size
midway, so a segment begins with the first step that starts at or behind its threshold. Everything else
(iteration to samples and back, iterations in all) follows from the resulting table. A run that goes on with
other batches than it had begins its table at the place it has reached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from redline.plan.rules import broken


@dataclass(frozen=True, slots=True)
class Segment:
    """From this iteration and sample on, steps take `batch_size` sequences."""

    first_iteration: int
    first_sample: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a run stands that is resumed.

    Attributes:
        iteration, samples: done so far.
        segments: of the steps so far; none where that is not known.
    """

    iteration: int = 0
    samples: int = 0
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Global batch sizes over a run; pure functions of the samples consumed.

    Attributes:
        segments: ascending; the last one goes on for ever. What is before the first is not known.
        micro_batch_size: sequences in one microbatch on one rank.
        dp: data-parallel ranks; every global batch is a multiple of micro_batch_size * dp.
        total_iterations: steps of the whole run.
        new_from: the iteration from which on it follows the options of now; before, a resumed run took
            other batches.
    """

    segments: tuple[Segment, ...]
    micro_batch_size: int
    dp: int
    total_iterations: int
    new_from: int = 0

    @property
    def total_samples(self) -> int:
        """Sequences consumed by the whole run."""
        return self.samples_at(self.total_iterations)

    @property
    def final_batch_size(self) -> int:
        """The global batch size once every ramp is over; evaluation uses it."""
        return self.segments[-1].batch_size

    @property
    def is_constant(self) -> bool:
        """Whether every step takes the same number of sequences."""
        return len(self.segments) == 1

    def global_batch_size(self, consumed_samples: int) -> int:
        """Sequences of the step that starts after `consumed_samples` sequences."""
        return self._segment_of_sample(consumed_samples).batch_size

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches each rank runs in that step."""
        return self.global_batch_size(consumed_samples) // (self.micro_batch_size * self.dp)

    def samples_at(self, iteration: int) -> int:
        """Sequences consumed by the first `iteration` steps; their share of those before the table."""
        first = self.segments[0]
        if iteration < first.first_iteration:
            return first.first_sample * iteration // first.first_iteration
        index = bisect_right(self.segments, iteration, key=lambda segment: segment.first_iteration) - 1
        segment = self.segments[index]
        return segment.first_sample + (iteration - segment.first_iteration) * segment.batch_size

    def iteration_at(self, consumed_samples: int) -> int:
        """How many whole steps `consumed_samples` sequences make."""
        first = self.segments[0]
        if consumed_samples < first.first_sample:
            return first.first_iteration * consumed_samples // first.first_sample
        segment = self._segment_of_sample(consumed_samples)
        return segment.first_iteration + (consumed_samples - segment.first_sample) // segment.batch_size

    def until(self, iteration: int) -> tuple[Segment, ...]:
        """The segments in which the first `iteration` steps lie."""
        return tuple(each for each in self.segments if each.first_iteration < iteration)

    def _segment_of_sample(self, consumed_samples: int) -> Segment:
        index = bisect_right(self.segments, consumed_samples, key=lambda segment: segment.first_sample) - 1
        return self.segments[max(0, index)]


START = Reached()


def make_batch_schedule(
    thresholds: Sequence[tuple[int, int]],
    *,
    micro_batch_size: int,
    dp: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
    decrease_if_needed: bool = False,
    reached: Reached = START,
) -> BatchSchedule:
    """A schedule from (consumed samples, batch size) thresholds, the first at 0, ascending.

    Args:
        reached: from where on the thresholds decide.
        train_iters, train_samples: exactly one; samples that do not fill a last step are left out.
        decrease_if_needed: round batch sizes down to a multiple of micro_batch_size * dp in place of refusing
            them.

    Raises: ConfigError for a batch size that the ranks cannot share.
    """
    assert (train_iters is None) != (train_samples is None)
    assert thresholds[0][0] == 0 and list(thresholds) == sorted(
        thresholds, key=lambda threshold: threshold[0]
    )
    segments, iteration, sample = list(reached.segments), reached.iteration, reached.samples
    for (_, asked), following in zip_longest(thresholds, thresholds[1:]):
        size = _shared(asked, micro_batch_size, dp, decrease_if_needed)
        steps = 0 if following is None else max(0, -(-(following[0] - sample) // size))
        starts = steps > 0 or following is None  # else no step starts inside this segment
        if starts and (not segments or segments[-1].batch_size != size):
            segments.append(Segment(iteration, sample, size))
        iteration, sample = iteration + steps, sample + steps * size
    schedule = BatchSchedule(tuple(segments), micro_batch_size, dp, train_iters or 0, reached.iteration)
    if train_samples is not None:
        schedule = replace(schedule, total_iterations=schedule.iteration_at(train_samples))
    if not schedule.total_iterations:
        first = segments[0].batch_size
        raise broken(
            "samples-fill-a-step",
            f"--train-samples {train_samples} is less than one step of {first} samples.",
            "samples that do not fill a step are not trained on, so nothing would be.",
            f"use --train-samples {first} or more, or a smaller --global-batch-size.",
            "--train-samples",
            "--global-batch-size",
        )
    return schedule


def ramp_up(start: int, increment: int, samples: int, final: int) -> list[tuple[int, int]]:
    """Thresholds of `--rampup-batch-size START INCREMENT SAMPLES` up to the global batch size `final`.

    The batch grows by `increment` at equal distances over the first `samples` samples.
    """
    steps, rest = divmod(final - start, increment) if increment > 0 else (0, 1)
    if steps < 0 or rest or start < 1 or samples < 0:
        raise broken(
            "rampup-steps",
            f"--rampup-batch-size {start} {increment} {samples} does not reach --global-batch-size {final}.",
            "the batch grows from START by INCREMENT to the global batch.",
            "choose an increment that divides the global batch minus START.",
            "--rampup-batch-size",
            "--global-batch-size",
        )
    return [
        (-(-step * samples // steps) if steps else 0, start + step * increment) for step in range(steps + 1)
    ]


def _shared(asked: int, micro_batch_size: int, dp: int, decrease_if_needed: bool) -> int:
    """A batch size the ranks can share: `asked`, or rounded down where that is allowed."""
    unit = micro_batch_size * dp
    size = asked // unit * unit if decrease_if_needed else asked
    if size < 1 or size % unit:
        lower, upper = asked // unit * unit, -(-asked // unit) * unit
        near = " or ".join(str(value) for value in (lower, upper) if value)
        raise broken(
            "batch-of-ranks",
            f"--global-batch-size {asked} cannot be split by --micro-batch-size {micro_batch_size} over {dp} "
            f"data-parallel rank{'s' * (dp > 1)}.",
            f"every step runs whole microbatches, so the global batch is a multiple of {unit}.",
            f"use {near}, or another --micro-batch-size.",
            "--global-batch-size",
            "--micro-batch-size",
        )
    return size
