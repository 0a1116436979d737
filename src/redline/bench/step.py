"""Whole optimizer steps of a configuration: tokens/s, MFU in both conventions, peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import Any

from redline.bench.in_place import attention_in_place
from redline.build import compile_failure_explained
from redline.config import Environment, Parsed
from redline.errors import ConfigError
from redline.formulas.flops import CONVENTIONS, Attended, flops_per_packed_token
from redline.ledger import mfu
from redline.run import open_run
from redline.step import StepOutcome

WARMUP_STEPS = 3


def bench_step(
    parsed: Parsed, environment: Environment, *, steps: int, say: Callable[[str], object]
) -> dict[str, Any]:
    """Run WARMUP_STEPS + `steps` steps of the configuration as `redline train` would; nothing is saved.

    On a GPU one step more, where the run has it, shows attention in place (in_place.py).

    Raises: ConfigError when the run is shorter than that.
    """
    run = open_run(parsed, environment, say)
    wanted = WARMUP_STEPS + steps
    if run.plan.batch.total_iterations - run.state.iteration < wanted:
        raise ConfigError(
            f"the run has {run.plan.batch.total_iterations} steps, and the benchmark takes {wanted}.",
            why=f"{WARMUP_STEPS} steps warm up and {steps} are measured.",
            mend=f"use --train-iters {wanted} or more, or fewer --steps.",
        )
    step = run.make_step()
    with compile_failure_explained(), closing(run.batches()) as batches:
        outcomes = [step(next(batches)) for _ in range(wanted)]
        peak_bytes = run.meter.peak_bytes()
        more = run.plan.batch.total_iterations > run.state.iteration
        attention = attention_in_place(run, lambda: step(next(batches))) if more else None
    measured = outcomes[WARMUP_STEPS:]
    rates = [outcome.num_tokens / outcome.time_s for outcome in measured]
    rate = statistics.median(rates)
    shape, seq_length = run.plan.shape, run.config.train.seq_length
    num_tokens = sum(outcome.num_tokens for outcome in measured)
    work = Attended(*map(sum, zip(*(outcome.attended for outcome in measured), strict=True)))
    flops = [flops_per_packed_token(shape, num_tokens, work, convention) for convention in CONVENTIONS]
    per_device = rate / run.groups.world.size
    utilisation = [mfu(each, per_device, run.hardware, run.plan.precision) for each in flops]
    return {
        "case": _name(run.config.model.preset, shape.num_layers, seq_length, measured[0]),
        "parameters": run.plan.parameters.total,
        "precision": run.plan.precision,
        "micro_batch_size": run.config.train.micro_batch_size,
        "seq_length": seq_length,
        "tokens_per_step": measured[0].num_tokens,
        "steps": steps,
        "tokens_per_s": rate,
        "tokens_per_s_range": [min(rates), max(rates)],
        "step_time_s": statistics.median(outcome.time_s for outcome in measured),
        "mfu": {each.convention: each.as_dict() for each in utilisation},
        "peak_memory_bytes": peak_bytes,
        "predicted_memory": run.plan.memory.as_dict(),
        "loss": [outcomes[0].loss, outcomes[-1].loss],
        "attention": attention,
        "choices": [asdict(choice) for choice in run.choices],
    }


def _name(preset: str | None, num_layers: int, seq_length: int, outcome: StepOutcome) -> str:
    return f"{preset or 'custom'}-{num_layers}L-{seq_length}x{outcome.num_samples}"
