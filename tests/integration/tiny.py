"""The tiny run of conftest.py as option values that a test can change, opened or trained in this process."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redline.config import Environment, Parsed, parse_args, value_of
from redline.config.tree import options_by_field
from redline.data import Microbatch
from redline.run import OpenRun, open_run
from redline.run.batches import eval_batches
from redline.step import Evaluation, StepOutcome, evaluate

from .conftest import TINY

Values = Mapping[str, Any]


def _stated(words: str) -> dict[str, Any]:
    parsed = parse_args(words.split())
    return {name: value_of(parsed.config, name) for name in parsed.explicit}


TINY_VALUES = _stated(TINY)


def words_of(values: Values) -> list[str]:
    """The command line that states these values; a default is left unsaid."""
    words: list[str] = []
    for name, value in values.items():
        option = options_by_field()[name]
        if value != option.default:
            words += shlex.split(option.show(value))
    return words


def parsed(values: Values) -> Parsed:
    """These options on top of the tiny run's; the default of an option takes it away from there."""
    return parse_args(words_of({**TINY_VALUES, **values}))


def opened(
    cache: Path, values: Values | None = None, say: Callable[[str], object] = lambda _: None
) -> OpenRun:
    """The run of these options, ready to step; its caches lie in `cache`, the environment plays no part."""
    return open_run(parsed(values or {}), Environment(cache_dir=cache, omp_num_threads=1), say)


def take_steps(run: OpenRun, count: int | None = None) -> list[StepOutcome]:
    """The next `count` steps, or all that are left."""
    step, left = run.make_step(), run.plan.batch.total_iterations - run.state.iteration
    batches = run.batches()
    try:
        return [step(next(batches)) for _ in range(left if count is None else count)]
    finally:
        batches.close()


def valid_batches(run: OpenRun) -> list[Microbatch]:
    """What an evaluation of the run sees; nothing where it has no validation split."""
    source = run.splits.valid
    if source is None:
        return []
    size = run.config.train.micro_batch_size
    return list(eval_batches(source, run.plan.evaluation.samples, size, num_workers=0))


def valid_loss(run: OpenRun) -> Evaluation:
    """An evaluation, as the run makes it."""
    return evaluate(run.state.model, valid_batches(run), run.device, fp8=run.state.fp8)
