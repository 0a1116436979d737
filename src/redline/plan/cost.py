"""The cost model: how long a training step takes on a named device, and where the time goes.

A roofline per class of operator (formulas/time.py at the rates of plan/cost_rates.py), collectives by latency
and bandwidth less what runs under compute, the pipeline's bubble by formula, and the host where it is slower
than the device. Every second has one cause, every cause one account:

    ideal           model FLOPs of the step over the peak of the format each product runs in
    kernels         GEMMs and attention below peak, elementwise work, loss, optimizer
    communication   exposed collectives by axis, bubble and imbalance of the pipeline
    memory          recomputed work
    host            time the device waits for Python to start kernels

It is arithmetic: no measurement of the run in question enters, so it is stated with an uncertainty, the
spread of its error over published runs (docs/doctor.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redline.formulas.flops import CONVENTIONS, Convention, flops_per_token
from redline.formulas.params import is_moe
from redline.formulas.state import optimizer_state_bytes
from redline.formulas.time import Rates, bubble_share, collective_s, round_trip_s, stream_s
from redline.formulas.traffic import Collective, optimizer_bytes, unscale_bytes
from redline.plan.cost_layer import (
    HIDDEN_IF_UNORDERED,
    LayerCost,
    Parts,
    embedding_cost,
    head_cost,
    layer_cost,
)
from redline.plan.cost_memory import RankMemory, rank_memory, rank_parameters
from redline.plan.cost_setup import Setup

ACCOUNTS: dict[str, tuple[str, ...]] = {
    "ideal": ("ideal",),
    "kernels": ("gemm", "attention", "elementwise", "loss", "optimizer"),
    "communication": ("tp", "cp", "ep", "pp", "dp", "bubble", "imbalance"),
    "memory": ("recompute",),
    "host": ("launch",),
}
# Half of the published dense Megatron runs are predicted within the first, four fifths within the second.
UNCERTAINTY = 0.10
UNCERTAINTY_WIDE = 0.20
# Host seconds to start the kernels of one layer, forward and backward.
HOST_S = {"transformer_engine": 1.1e-3, "fused": 0.7e-3, "local": 1.6e-3}
HOST_COMPILED, HOST_GRAPH = 0.45, 0.08
DP_COVER = 0.85  # of the backward pass that a reduction can run under
DP_SLOWER = 0.12  # of a hidden reduction's time that the compute above it loses
SEND_LEFT = 0.2  # of an overlapped send between stages


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A predicted step.

    Attributes:
        setup: what was costed.
        parts: seconds of a step by cause, on an average rank; they add up to step_s.
        tokens_per_s: of one device.
        mfu: by convention, over the dense 16-bit peak (fp8 runs too, as published figures are).
        mfu_of_format: "causal-half" over the peak of the GEMMs' own format.
        memory: bytes of the fullest rank.
        uncertainty: relative error of step_s to expect, at even odds.
    """

    setup: Setup
    parts: Mapping[str, float]
    step_s: float
    tokens_per_s: float
    mfu: Mapping[Convention, float]
    mfu_of_format: float
    memory: RankMemory
    uncertainty: float = UNCERTAINTY

    @property
    def accounts(self) -> dict[str, float]:
        """Seconds of a step by account."""
        return {
            name: sum(self.parts.get(cause, 0.0) for cause in causes) for name, causes in ACCOUNTS.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s,
            "mfu": dict(self.mfu),
            "mfu_of_format": self.mfu_of_format,
            "accounts": self.accounts,
            "parts": dict(self.parts),
            "memory": self.memory.as_dict(),
            "uncertainty": self.uncertainty,
        }


def predict(setup: Setup, rates: Rates) -> StepCost:
    """The step of `setup` on devices of these rates."""
    shape, grid, M = setup.shape, setup.grid, setup.num_microbatches
    moe_layers = sum(is_moe(shape, layer) for layer in range(shape.num_layers))
    dense = layer_cost(setup, rates, moe=False)
    sparse = layer_cost(setup, rates, moe=True) if moe_layers else dense
    busy = _microbatch(setup, rates, dense, sparse, moe_layers)  # all stages together, one microbatch
    parts = Parts()
    parts.merge(busy, M / grid.pp)
    mean = busy.total / grid.pp
    slowest = _slowest_stage(setup, rates, dense, sparse, moe_layers)
    if slowest > mean * (1 + 1e-9):
        parts.add("imbalance", (slowest - mean) * M)
    parts.add("launch", _launch_gap(setup, mean) * M)
    parts.add("bubble", bubble_share(grid.pp, setup.vpp, M) * M * (mean + _launch_gap(setup, mean)))
    parts.add("pp", _sends(setup, rates) * M)
    parts.add("dp", _data_parallel(setup, rates, mean, dense))
    parts.add("optimizer", _optimizer(setup, rates))
    return _cost(setup, rates, parts)


def _cost(setup: Setup, rates: Rates, parts: Parts) -> StepCost:
    """Split off the ideal time, and derive the rates."""
    step_s = parts.total
    shape, grid = setup.shape, setup.grid
    tokens = setup.global_batch_size * setup.seq_length / grid.world_size  # of one device
    counted = {name: flops_per_token(shape, setup.seq_length, name) for name in CONVENTIONS}
    half = counted["causal-half"]
    peak = rates.peak[setup.dtype]
    gemms = half.total - half.attention_core - half.head - half.mtp
    operand = rates.peak["fp8"] if setup.fp8 else peak
    ideal_gemm = tokens * (gemms / operand + (half.head + half.mtp) / peak)
    ideal_attention = tokens * half.attention_core / peak
    seconds = dict(parts.seconds)
    seconds["gemm"] = max(0.0, seconds.get("gemm", 0.0) - ideal_gemm)
    seconds["attention"] = max(0.0, seconds.get("attention", 0.0) - ideal_attention)
    seconds["ideal"] = step_s - sum(seconds.values())
    useful = setup.useful * tokens / step_s
    return StepCost(
        setup=setup,
        parts=MappingProxyType(seconds),
        step_s=step_s,
        tokens_per_s=useful,
        mfu=MappingProxyType({name: useful * counted[name].total / peak for name in CONVENTIONS}),
        mfu_of_format=useful * half.total / operand,
        memory=rank_memory(setup),
    )


def _microbatch(setup: Setup, rates: Rates, dense: LayerCost, sparse: LayerCost, moe_layers: int) -> Parts:
    """Everything one microbatch costs on all stages together."""
    shape, parts = setup.shape, Parts()
    last = sparse if is_moe(shape, shape.num_layers - 1) else dense
    for layer, times in (
        (dense, shape.num_layers - moe_layers),
        (sparse, moe_layers),
        (last, shape.mtp_num_layers),
    ):
        for pass_ in (layer.forward, layer.backward, layer.recompute):
            parts.merge(pass_, times)
    parts.merge(head_cost(setup, rates))
    parts.merge(embedding_cost(setup, rates))
    return parts


def _slowest_stage(setup: Setup, rates: Rates, dense: LayerCost, sparse: LayerCost, moe_layers: int) -> float:
    """Seconds a microbatch on the slowest stage: a middle one full of layers, or the last with the head."""
    shape, grid = setup.shape, setup.grid
    layer = max(dense.total, sparse.total) if moe_layers else dense.total
    first, last = embedding_cost(setup, rates).total, head_cost(setup, rates).total
    extra = shape.mtp_num_layers * layer
    if grid.pp == 1:
        mixed = (shape.num_layers - moe_layers) * dense.total + moe_layers * sparse.total
        return mixed + first + last + extra
    full = setup.layers_per_stage
    ends = full - 1 if setup.balanced_ends else full
    return max(full * layer, ends * layer + last + extra, ends * layer + first)


def _launch_gap(setup: Setup, device_s: float) -> float:
    """Seconds a microbatch that a stage's device waits for the host."""
    host = HOST_S.get(setup.impl, HOST_S["transformer_engine"])
    if setup.cuda_graph:
        host *= HOST_GRAPH
    elif setup.compiled:
        host *= HOST_COMPILED
    experts = 1.0
    if setup.shape.num_experts:
        experts = 1.5 if setup.grouped_experts else 1.0 + 0.25 * setup.shape.num_experts / setup.grid.ep
    layers = setup.shape.num_layers / setup.grid.pp
    again = 1.3 if setup.recompute == "full" else 1.0
    return max(0.0, host * experts * again * layers - device_s)


def _sends(setup: Setup, rates: Rates) -> float:
    """Seconds a microbatch of sending activations and their gradients to the neighbouring stages."""
    grid = setup.grid
    if grid.pp == 1:
        return 0.0
    size = setup.tokens * setup.shape.hidden * 2 / (grid.tp if setup.sequence_parallel else 1)
    stride = grid.world_size // grid.pp  # pipeline neighbours are the farthest apart
    once = collective_s(rates, "send", size, 2, stride=min(stride, rates.gpus_per_node))
    left = SEND_LEFT if setup.overlap_p2p else 1.0
    return 2 * setup.vpp * once * left


def _data_parallel(setup: Setup, rates: Rates, microbatch_s: float, layer: LayerCost) -> float:
    """Exposed seconds of reducing gradients and gathering parameters over dp x cp."""
    grid, inside, instances = setup.grid, setup.shard_ranks, setup.instances
    ranks, stride = grid.dp * grid.cp, grid.tp
    if ranks == 1:
        return 0.0
    held = rank_parameters(setup)
    dense_bytes = held.dense * setup.grad_bytes
    buckets = max(1, round(held.dense / setup.bucket_elements)) if setup.overlap_grad_reduce else 1
    kind: Collective = "all_reduce" if setup.sharding == "none" else "reduce_scatter"
    reduce = collective_s(rates, kind, dense_bytes / buckets, inside, stride, times=buckets)
    # What an instance has summed goes across while backward runs, too: one behind the other, at most.
    summed = dense_bytes / buckets / (1 if setup.sharding == "none" else inside)
    reduce += collective_s(rates, "all_reduce", summed, instances, stride * inside, times=buckets)
    gather = 0.0
    if setup.sharding != "none":
        size = held.dense * setup.gather_bytes / buckets
        gather = collective_s(rates, "all_gather", size, inside, stride, times=buckets)
    if held.expert:
        together = grid.ep * grid.etp
        apart = max(1, ranks * grid.tp // together)
        reduce += collective_s(rates, kind, held.expert * setup.grad_bytes, apart, together)
        if setup.sharding != "none":
            gather += collective_s(rates, "all_gather", held.expert * setup.gather_bytes, apart, together)
    shares = layer.backward.total / layer.total if layer.total else 0.6
    again = setup.num_microbatches if setup.sharding in ("parameters", "gradients") else 1
    # Gathers of an FSDP that wait behind the compute in one hardware queue find half as much to run under.
    cover = DP_COVER if setup.ordered or setup.sharding != "parameters" else DP_COVER * HIDDEN_IF_UNORDERED
    backward, forward = shares * microbatch_s * cover, (1 - shares) * microbatch_s * cover
    visible = again * _visible(reduce, backward, setup.overlap_grad_reduce, buckets)
    if setup.sharding == "parameters":
        visible += 2 * setup.num_microbatches * _visible(gather, forward, True, buckets)
    else:
        visible += _visible(gather, forward, setup.overlap_param_gather, buckets)
    return visible


def _visible(seconds: float, cover: float, overlapped: bool, buckets: int) -> float:
    """What is seen of a collective in `buckets` parts that may run under `cover` seconds of compute."""
    if not overlapped:
        return seconds
    left = seconds / buckets  # the last bucket has nothing to hide under
    hidden = min(seconds - left, cover)
    return seconds - hidden + DP_SLOWER * hidden


def _optimizer(setup: Setup, rates: Rates) -> float:
    held = rank_parameters(setup)
    shards = 1 if setup.sharding == "none" else setup.shard_ranks
    expert_shards = max(1, shards * setup.grid.tp // (setup.grid.ep * setup.grid.etp))
    owned = held.dense / shards + held.expert / expert_shards
    whole = held.dense + held.expert
    # Zeroing and the norm of gradients touch the whole buffer; the update its own shard.
    zeroed = setup.grad_bytes * whole
    unscaled = unscale_bytes(setup.grad_bytes) * owned if setup.dtype == "fp16" else 0.0
    states = setup.states
    away = states.away * optimizer_state_bytes(states) * owned
    travels = round_trip_s(away, rates.host_bytes_per_s, overlap=states.stages > 1)
    return stream_s(rates, optimizer_bytes(setup.grad_bytes) * owned + zeroed + unscaled) + travels
