"""What to change about a run that does not fit: the cheapest changes that would, with their flags.

Each change is tried by planning the changed configuration, alone and then together with others, until enough
are found that fit. They are ordered by what they cost: time by the cost model, and for what may cost quality
(bf16 states) or throughput in a way no formula sees (a smaller microbatch) a small share each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from redline.config import InvalidConfigError, RunConfig, check, value_of, with_values
from redline.config.tree import options_by_field
from redline.errors import ConfigError
from redline.formulas.memory import MemoryEstimate
from redline.formulas.state import SHARDED
from redline.hardware import Hardware
from redline.plan.optimizer_offload import travel_s
from redline.plan.plan import Plan, make_plan
from redline.units import format_bytes

MOST_TOGETHER = 3
EXACT, SMALLER_MICROBATCH, ROUNDED_MOMENTS, ROUNDED_GRADIENTS, SHORTER = 0.0, 0.02, 0.03, 0.05, 0.5
CODED_MOMENTS = 0.04
Values = Mapping[str, Any]
UNSTATED = {
    "recompute": "none",
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": ("core_attn",),
}


@dataclass(frozen=True, slots=True)
class Change:
    """Options that would make a run fit.

    Attributes:
        flags: as one would type them.
        reserved_bytes: what the run would then need.
        cost: predicted share of a step's time, with the shares above.
    """

    flags: str
    reserved_bytes: int
    cost: float

    def __str__(self) -> str:
        return f"{self.flags} ({format_bytes(self.reserved_bytes)})"


def lighter_changes(
    config: RunConfig, plan: Plan, hardware: Hardware, limit_bytes: int, count: int = 3
) -> list[Change]:
    """The `count` cheapest changes of `config` with which at most `limit_bytes` are reserved."""
    found: list[Change] = []
    seen: set[frozenset[tuple[str, Any]]] = set()
    candidates = list(_candidates(config, plan, hardware))
    for together in range(1, MOST_TOGETHER + 1):
        for parts in combinations(candidates, together):
            values = _together(config, [part for part, _ in parts])
            if frozenset(values.items()) in seen:
                continue
            seen.add(frozenset(values.items()))
            change = _tried(config, plan, hardware, values, sum(extra for _, extra in parts))
            if change is not None and change.reserved_bytes <= limit_bytes:
                found.append(change)
        if len(found) >= count:
            break
    return sorted(found, key=lambda change: change.cost)[:count]


def _candidates(config: RunConfig, plan: Plan, hardware: Hardware) -> Iterator[tuple[Values, float]]:
    """Single changes and their cost beside that of recompute."""
    layers, micro = plan.shape.num_layers, config.train.micro_batch_size
    selective = {**UNSTATED, "recompute_granularity": "selective"}
    if plan.precision == "bf16":
        yield {"use_precision_aware_optimizer": True}, EXACT
        moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
        yield {"use_precision_aware_optimizer": True, **moments}, ROUNDED_MOMENTS
        coded = dict.fromkeys(moments, "fp8")
        yield {"use_precision_aware_optimizer": True, **coded}, CODED_MOMENTS
        yield {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}, ROUNDED_GRADIENTS
    if (seconds := travel_s(sum(plan.memory.fullest.state[name] for name in SHARDED), hardware)) is not None:
        microbatches = plan.batch.final_batch_size // (micro * plan.batch.dp)
        yield {"optimizer_cpu_offload": True}, seconds / (plan.recompute_cost.step_s * microbatches)
    if plan.microbatch.attention == "unfused":
        yield {**selective, "recompute_modules": ("core_attn",)}, 0.0
    yield {**selective, "recompute_modules": ("layernorm", "activation")}, 0.0
    yield {**selective, "recompute_modules": ("layernorm", "mlp")}, 0.0
    full = {**UNSTATED, "recompute_granularity": "full"}
    if layers > 1:
        yield {**full, "recompute_method": "block", "recompute_num_layers": layers // 2}, 0.0
    yield {**full, "recompute_method": "uniform", "recompute_num_layers": 1}, 0.0
    if micro > 1 and micro % 2 == 0:
        same_batch = {"global_batch_size": plan.batch.final_batch_size}
        yield {"micro_batch_size": micro // 2, **same_batch}, SMALLER_MICROBATCH
    if config.train.seq_length % 2 == 0:
        yield {"seq_length": config.train.seq_length // 2}, SHORTER


def _together(config: RunConfig, parts: Sequence[Values]) -> dict[str, Any]:
    """What these change together; nothing where they contradict each other."""
    values: dict[str, Any] = {}
    for part in parts:
        if any(values.get(name, value) != value for name, value in part.items()):
            return {}
        values |= part
    return {name: value for name, value in values.items() if value_of(config, name) != value}


def _tried(config: RunConfig, plan: Plan, hardware: Hardware, values: Values, extra: float) -> Change | None:
    """The change that these values make; None where they are refused or change nothing."""
    if not values or None in values.values():  # what was stated cannot be taken back by a flag
        return None
    changed = with_values(config, values)
    try:
        check(changed, explicit=frozenset(values))
        lighter = make_plan(changed, hardware, plan.shape.vocab_size, plan.grid.world_size)
    except (ConfigError, InvalidConfigError):
        return None
    lighter = lighter.with_implementation(plan.microbatch.attention, plan.microbatch.fused)
    cost = lighter.recompute_cost.share(lighter.microbatch.recompute, plan.shape.num_layers)
    flags = " ".join(options_by_field()[name].show(value) for name, value in values.items())
    return Change(flags, lighter.memory.reserved, cost + extra)


def advice(changes: Sequence[Change]) -> str:
    """The changes in one sentence."""
    if not changes:
        return "no recompute, storage or microbatch makes it fit: take a smaller model or more devices"
    return "any of these would fit: " + "; ".join(f"({n}) {each}" for n, each in enumerate(changes, 1))


def least_needed(estimate: MemoryEstimate, available: int, failed: bool) -> int:
    """What a changed run may reserve: what is there, and, where the prediction was already too low, less."""
    return min(available, round(0.9 * estimate.reserved)) if failed else available
