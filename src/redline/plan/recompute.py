"""What a run recomputes: as the options say, or, under `--recompute auto`, the cheapest choice that fits.

The search is over sets of modules, alone or behind a block of first layers that are recomputed whole, and
over uniform units of layers. Memory comes from formulas/memory.py, time from the cost model. More layers need
less memory and more time, so each set of modules is tried with the fewest whole layers that make it fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from redline.choice import Choice
from redline.config import RunConfig
from redline.config.recompute import BESIDE_RESIDUAL_NORM
from redline.formulas.activations import MicrobatchShape
from redline.formulas.host import ACTIVATIONS
from redline.formulas.memory import MemoryEstimate, training_memory
from redline.formulas.recompute import MODULES, NOTHING, Module, Recompute, full, selective
from redline.formulas.shape import ModelShape
from redline.formulas.state import StateDtypes
from redline.formulas.time import unhidden_s
from redline.hardware import Hardware, hardware_named
from redline.plan.cost_layer import head_cost, layer_cost, stream_gather_s
from redline.plan.cost_rates import copy_bytes_per_s, rates_of
from redline.plan.cost_setup import setup_of
from redline.units import format_bytes, format_duration

Needed = Callable[[Recompute], int]  # bytes that a run reserves
RANKING_DEVICE = "h100"  # whose rates rank choices where the device has no data sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCost:
    """Predicted seconds of one microbatch.

    Attributes:
        step_s: of the whole microbatch, nothing recomputed.
        layer_s: of running one layer's forward again.
        module_s: of one layer's modules again.
        copy_bytes_per_s: of copies to and from host memory, one direction; None where that is not known.
        gather_s: of gathering the input of one unit, where its parts are spread over tp ranks.
    """

    step_s: float
    layer_s: float
    module_s: Mapping[Module, float]
    copy_bytes_per_s: float | None = None
    gather_s: float = 0.0

    def share(self, choice: Recompute, num_layers: int) -> float:
        """Added time over the step's time."""
        units = choice.units(num_layers)
        whole, gathers = sum(map(len, units)), len(units) if choice.spread else 0
        each = sum(self.module_s[name] for name in choice.modules)
        if choice.drops("mlp"):  # what the others would repeat of the MLP is in it
            each -= self.module_s["activation"] * choice.drops("activation")
            each -= self.module_s["layernorm"] / 2 * choice.drops("layernorm")
        again = whole * self.layer_s + gathers * self.gather_s
        return (again + (num_layers - whole) * each) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSearch:
    """Everything `--recompute auto` decides by.

    Attributes:
        budget_bytes: what the run may reserve.
        cost: of recomputing.
        modules: that may be dropped.
    """

    budget_bytes: int
    cost: RecomputeCost
    modules: tuple[Module, ...] = MODULES

    def best(self, shape: ModelShape, run: MicrobatchShape, dtypes: StateDtypes) -> tuple[Recompute, Choice]:
        """The cheapest choice that fits, else the one that needs least, and the record of it."""

        def needed(choice: Recompute) -> int:
            return training_memory(shape, replace(run, recompute=choice), dtypes).reserved

        found: list[tuple[float, int, Recompute]] = []
        tried: list[tuple[int, Recompute]] = []
        for choice in self._candidates(shape.num_layers, needed):
            size = needed(choice)
            tried.append((size, choice))
            if size <= self.budget_bytes:
                found.append((self.cost.share(choice, shape.num_layers), size, choice))
        if found:
            share, size, choice = min(found, key=lambda each: each[:2])
        else:
            size, choice = min(tried, key=lambda each: each[0])
            share = self.cost.share(choice, shape.num_layers)
        return choice, Choice("recompute", "auto", str(choice), self._why(needed(NOTHING), size, share))

    def _candidates(self, num_layers: int, needed: Needed) -> Iterator[Recompute]:
        for count in range(len(self.modules) + 1):
            for modules in combinations(self.modules, count):
                yield self._fewest_layers(selective(modules), num_layers, needed)
        for unit in range(1, num_layers + 1):
            yield full("uniform", unit)

    def _fewest_layers(self, choice: Recompute, num_layers: int, needed: Needed) -> Recompute:
        """`choice` behind the fewest whole layers with which it fits; behind all but one if it never does."""
        low, high = 0, num_layers
        while low < high:
            middle = (low + high) // 2
            if needed(_behind(choice, middle)) <= self.budget_bytes:
                high = middle
            else:
                low = middle + 1
        return _behind(choice, min(low, num_layers))

    def _why(self, without: int, size: int, share: float) -> str:
        budget, plain = format_bytes(self.budget_bytes), format_bytes(without)
        if not share:
            return f"{plain} fit the budget of {budget} with nothing recomputed"
        said = f"{format_bytes(size)} in place of {plain}, for about {share:.1%} of a step's time"
        if size > self.budget_bytes:
            return f"{said}; nothing fits the budget of {budget}, this needs the least of those tried"
        return f"{said}; the budget is {budget}"


def _behind(choice: Recompute, layers: int) -> Recompute:
    return replace(choice, unit=1, layers=layers) if layers else choice


def stated_recompute(config: RunConfig) -> Recompute:
    """What the options ask for; `--recompute auto` asks for nothing yet."""
    r = config.recompute
    if r.recompute_granularity == "full":
        assert r.recompute_method is not None and r.recompute_num_layers is not None, "a rule"
        return full(r.recompute_method, r.recompute_num_layers, r.distribute_saved_activations)
    if r.recompute_granularity == "selective":
        return selective(name for name in MODULES if name in r.recompute_modules)
    return NOTHING


def recompute_search(config: RunConfig, hardware: Hardware, cost: RecomputeCost) -> RecomputeSearch | None:
    """What `--recompute auto` searches by, None where the options state the choice."""
    if config.recompute.recompute != "auto":
        return None
    budget = round(config.recompute.memory_budget * hardware.memory_bytes)
    kept = BESIDE_RESIDUAL_NORM if config.kernels.fused_residual_rmsnorm else ()
    modules = tuple(each for each in MODULES if each not in kept)
    return RecomputeSearch(budget_bytes=budget, cost=cost, modules=modules)


def recompute_cost(
    config: RunConfig, hardware: Hardware, vocab_size: int, world_size: int = 1
) -> RecomputeCost:
    """The cost model's view of recompute; on a device without a data sheet the shares of an H100."""
    known = hardware.peak("bf16") is not None and hardware.bandwidth_bytes_per_s is not None
    ranking = hardware if known else hardware_named(RANKING_DEVICE)
    assert ranking is not None
    rates = rates_of(ranking)
    setup = replace(setup_of(config, world_size, vocab_size=vocab_size), recompute="none")
    layer = layer_cost(setup, rates, moe=False)
    again = {
        name: layer_cost(
            replace(setup, recompute="selective", recompute_modules=(name,)), rates, moe=False
        ).recompute.total
        for name in MODULES
    }
    whole = setup.shape.num_layers * layer.total + head_cost(setup, rates).total
    return RecomputeCost(
        step_s=whole,
        layer_s=layer.forward.total,
        module_s=again,
        copy_bytes_per_s=copy_bytes_per_s(hardware),
        gather_s=stream_gather_s(setup, rates),
    )


def recompute_choice(choice: Recompute, cost: RecomputeCost, saved_bytes: int, num_layers: int) -> Choice:
    """The record of a stated choice: what it saves and what it costs."""
    share, saved = cost.share(choice, num_layers), format_bytes(max(saved_bytes, 0))
    why = f"saves {saved} at the peak, for about {share:.1%} of a step's time"
    return Choice("recompute", str(choice), str(choice), why)


def offload_choice(run: MicrobatchShape, memory: MemoryEstimate, cost: RecomputeCost) -> tuple[Choice, ...]:
    """The record of activations kept in host memory, with bytes and time; nothing where none are."""
    layers = run.offload_layers
    if not layers:
        return ()
    why = "copies inside host memory: on a CPU this saves nothing"
    if run.device == "cuda":
        moved = memory.fullest.host[ACTIVATIONS]
        why = (
            f"{format_bytes(moved)} in pinned host memory, on a stream of its own, a layer ahead in backward"
        )
        if cost.copy_bytes_per_s is not None:
            once = moved / cost.copy_bytes_per_s
            share = unhidden_s(once, layers * cost.layer_s) / cost.step_s
            why += (
                f": {format_duration(once)} each way in a microbatch, at least {share:.1%} of its time more"
            )
    return (Choice("activation-offload", f"{layers} layers", f"{layers} layers", why),)
