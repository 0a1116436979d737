"""What to change about a run that does not fit: the cheapest changes that would, with their flags.

Each change is tried by planning the changed configuration, alone and then together with others, until enough
are found that fit. They are ordered by what they cost: time by the cost model, and for what may cost quality
(bf16 states) or throughput in a way no formula sees (a smaller microbatch) a small share each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import floor, log2
from time import perf_counter
from typing import Any

from redline.config import InvalidConfigError, RunConfig, check, value_of, with_values
from redline.config.tree import options_by_field
from redline.errors import ConfigError
from redline.formulas.host import ACTIVATIONS
from redline.formulas.memory import MemoryEstimate, training_memory
from redline.formulas.recompute import full
from redline.formulas.state import SHARDED
from redline.hardware import Hardware
from redline.plan.optimizer_offload import travel_s
from redline.plan.plan import Plan, make_plan
from redline.plan.recompute import recompute_search
from redline.units import format_bytes

MOST_TOGETHER = 3
LONGEST_S = 1.2  # a failing or starting run does not wait longer for advice
EXACT, SMALLER_MICROBATCH, ROUNDED_MOMENTS, ROUNDED_GRADIENTS, SHORTER = 0.0, 0.02, 0.03, 0.05, 0.5
CODED_MOMENTS, ROUNDED_OPERANDS = 0.04, 0.05
UNKNOWN_TRAVEL = 0.5  # of states to host memory and back, where PCIe's rate is not known
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
        host_bytes: what a rank would then keep of states and activations in pinned host memory.
        host_total: and with all else that it takes of its host.
    """

    flags: str
    reserved_bytes: int
    cost: float
    host_bytes: int = 0
    host_total: int = 0

    def __str__(self) -> str:
        host = f", and {format_bytes(self.host_bytes)} of the host's a rank" if self.host_bytes else ""
        return f"{self.flags} ({format_bytes(self.reserved_bytes)}{host})"


def lighter_changes(
    config: RunConfig,
    plan: Plan,
    hardware: Hardware,
    limit_bytes: int,
    count: int = 3,
    seconds: float = LONGEST_S,
    host_limit_bytes: int | None = None,
) -> list[Change]:
    """The `count` cheapest changes of `config` with which at most `limit_bytes` are reserved.

    None keeps more in host memory than before and by that more than `host_limit_bytes` a rank, where known.
    None holds another one that is enough by itself. What `seconds` do not suffice to try is left out.
    """
    until = perf_counter() + seconds
    found: dict[frozenset[tuple[str, Any]], Change] = {}
    seen: set[frozenset[tuple[str, Any]]] = set()
    alone: dict[int, Change] = {}  # what each does by itself, by place
    candidates = list(_candidates(config, plan, hardware, limit_bytes))

    def promise(places: tuple[int, ...]) -> tuple[bool, float]:
        """Those first that should fit, the cheapest first; then those that come nearest."""
        left = plan.memory.reserved - sum(plan.memory.reserved - alone[i].reserved_bytes for i in places)
        return left > limit_bytes, sum(alone[i].cost for i in places) if left <= limit_bytes else left

    for together in range(1, MOST_TOGETHER + 1):
        sets = combinations(range(len(candidates)) if together == 1 else alone, together)
        for places in sets if together == 1 else sorted(sets, key=promise):
            if perf_counter() > until:
                return _cheapest(found.values(), count)
            values = _together(config, [candidates[i][0] for i in places])
            asked = frozenset(values.items())
            searches = together > 1 and values.get("recompute") == "auto"  # a search each takes long
            if searches or asked in seen or any(enough <= asked for enough in found):
                continue
            seen.add(asked)
            extra = sum(candidates[i][1] for i in places)
            change = _tried(config, plan, hardware, values, extra, limit_bytes)
            if change is not None and not _host_holds(change, plan, host_limit_bytes):
                continue
            if change is not None and together == 1:
                alone[places[0]] = change
            if change is not None and change.reserved_bytes <= limit_bytes:
                found[asked] = change
        if len(found) >= count:
            break
    return _cheapest(found.values(), count)


def _host_holds(change: Change, plan: Plan, limit_bytes: int | None) -> bool:
    """Whether the host has the memory; what takes no more of it than the run itself is no worse."""
    return limit_bytes is None or change.host_total <= max(limit_bytes, plan.memory.fullest.host_total)


def _cheapest(changes: Iterable[Change], count: int) -> list[Change]:
    return sorted(changes, key=lambda change: change.cost)[:count]


def _candidates(
    config: RunConfig, plan: Plan, hardware: Hardware, limit_bytes: int
) -> Iterator[tuple[Values, float]]:
    """Single changes and their cost beside that of recompute."""
    if plan.grid.dp > 1:
        yield {"use_distributed_optimizer": True}, EXACT
    if plan.grid.tp > 1:
        yield {"sequence_parallel": True}, EXACT
    yield from _storage(plan, hardware)
    if config.recompute.recompute != "auto":  # which has tried the others
        yield from _recompute(config, plan, hardware, limit_bytes)
    yield from _smaller(config, plan, hardware, limit_bytes)


def _storage(plan: Plan, hardware: Hardware) -> Iterator[tuple[Values, float]]:
    """Narrower states and operands, and states in host memory."""
    if plan.precision == "bf16":
        yield {"use_precision_aware_optimizer": True}, EXACT
        moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
        yield {"use_precision_aware_optimizer": True, **moments}, ROUNDED_MOMENTS
        coded = dict.fromkeys(moments, "fp8")
        yield {"use_precision_aware_optimizer": True, **coded}, CODED_MOMENTS
        yield {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}, ROUNDED_GRADIENTS
    if hardware.kind == "cpu":
        return
    if plan.precision == "bf16" and plan.fp8 is None:
        yield {"fp8_format": "hybrid"}, ROUNDED_OPERANDS
    seconds = travel_s(sum(plan.memory.fullest.state[name] for name in SHARDED), hardware)
    microbatches = plan.batch.final_batch_size // (plan.batch.micro_batch_size * plan.batch.dp)
    share = None if seconds is None else seconds / (plan.recompute_cost.step_s * microbatches)
    yield {"optimizer_cpu_offload": True}, UNKNOWN_TRAVEL if share is None else share


def _recompute(
    config: RunConfig, plan: Plan, hardware: Hardware, limit_bytes: int
) -> Iterator[tuple[Values, float]]:
    """What may be computed again, and leaving that to the search; their cost is the cost model's."""
    layers = plan.shape.num_layers
    selective = {**UNSTATED, "recompute_granularity": "selective"}
    if plan.microbatch.attention == "unfused":
        yield {**selective, "recompute_modules": ("core_attn",)}, 0.0
    yield {**selective, "recompute_modules": ("layernorm", "activation")}, 0.0
    yield {**selective, "recompute_modules": ("layernorm", "mlp")}, 0.0
    whole = {**UNSTATED, "recompute_granularity": "full"}
    if layers > 1:
        yield {**whole, "recompute_method": "block", "recompute_num_layers": layers // 2}, 0.0
    yield {**whole, "recompute_method": "uniform", "recompute_num_layers": 1}, 0.0
    budget = min(config.recompute.memory_budget, floor(100 * limit_bytes / hardware.memory_bytes) / 100)
    if budget > 0:
        yield {**UNSTATED, "recompute": "auto", "memory_budget": budget}, 0.0


def _smaller(
    config: RunConfig, plan: Plan, hardware: Hardware, limit_bytes: int
) -> Iterator[tuple[Values, float]]:
    """Half the microbatch, the largest that fits by itself, and 1, the global batch kept; shorter samples."""
    micro = config.train.micro_batch_size
    powers = range(1, micro.bit_length())
    sizes = [micro >> power for power in powers if micro % (1 << power) == 0]
    changes = {
        size: {"micro_batch_size": size, "global_batch_size": plan.batch.final_batch_size}
        for size in dict.fromkeys((*sizes, 1))
        if size < micro
    }
    fits = (size for size in changes if _fits(config, plan, hardware, changes[size], limit_bytes))
    for size in dict.fromkeys((*sizes[:1], *islice(fits, 1), 1)):
        if size in changes:
            yield changes[size], SMALLER_MICROBATCH * log2(micro / size)
    if config.train.seq_length % 2 == 0:
        yield {"seq_length": config.train.seq_length // 2}, SHORTER


def _fits(config: RunConfig, plan: Plan, hardware: Hardware, values: Values, limit_bytes: int) -> bool:
    change = _tried(config, plan, hardware, _together(config, [values]), 0.0, limit_bytes)
    return change is not None and change.reserved_bytes <= limit_bytes


def _together(config: RunConfig, parts: Sequence[Values]) -> dict[str, Any]:
    """What these change together; nothing where they contradict each other."""
    values: dict[str, Any] = {}
    for part in parts:
        if any(values.get(name, value) != value for name, value in part.items()):
            return {}
        values |= part
    return {name: value for name, value in values.items() if value_of(config, name) != value}


def _tried(
    config: RunConfig, plan: Plan, hardware: Hardware, values: Values, extra: float, limit_bytes: int
) -> Change | None:
    """The change that these values make; None where they are refused or change nothing."""
    if not values or None in values.values():  # what was stated cannot be taken back by a flag
        return None
    changed = with_values(config, values)
    try:
        check(changed, explicit=frozenset(values))
        stated = with_values(changed, {"recompute": "none"})
        lighter = make_plan(stated, hardware, plan.shape.vocab_size, plan.grid.world_size)
    except (ConfigError, InvalidConfigError):
        return None
    lighter = lighter.with_implementation(plan.microbatch.attention, plan.microbatch.fused)
    if changed.recompute.recompute == "auto":
        lighter = _searched(lighter, changed, hardware, limit_bytes)
    cost = lighter.recompute_cost.share(lighter.microbatch.recompute, plan.shape.num_layers)
    flags = " ".join(options_by_field()[name].show(value) for name, value in values.items())
    stage = lighter.memory.fullest
    kept = stage.host_states + stage.host.get(ACTIVATIONS, 0)
    return Change(flags, lighter.memory.reserved, cost + extra, kept, stage.host_total)


def _searched(plan: Plan, config: RunConfig, hardware: Hardware, limit_bytes: int) -> Plan:
    """The plan with what `--recompute auto` finds, or with all recomputed where that is too much already."""
    deepest = replace(plan.microbatch, recompute=full("uniform", 1))
    memory = training_memory(plan.shape, deepest, plan.dtypes)
    if memory.reserved > limit_bytes:
        return replace(plan, microbatch=deepest, memory=memory)
    plan = replace(plan, search=recompute_search(config, hardware, plan.recompute_cost))
    return plan.with_implementation(plan.microbatch.attention, plan.microbatch.fused)


def advice(changes: Sequence[Change]) -> str:
    """The changes in one sentence."""
    if not changes:
        tried = "no sharing, storage, recompute or microbatch that was tried makes it fit"
        return f"{tried}: take a smaller model or more devices"
    return "any of these would fit: " + "; ".join(f"({n}) {each}" for n, each in enumerate(changes, 1))


def least_needed(estimate: MemoryEstimate, available: int, failed: bool) -> int:
    """What a changed run may reserve: what is there, and, where the prediction was already too low, less."""
    return min(available, round(0.9 * estimate.reserved)) if failed else available
