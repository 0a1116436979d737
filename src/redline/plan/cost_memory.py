"""Bytes of the fullest rank under any layout, by Megatron's rules of who holds what.

State: weights, gradients, main parameters and moments, sharded as the setup says. Activations: the tensors
that a layer of fused operators keeps (norm input and output, q, k, v, attention's output, fc1's output, fc2's
input), or those of plain operators; divided over tp, cp, and counted for every microbatch in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from redline.formulas.params import is_moe, logical_tensors
from redline.formulas.state import optimizer_state_bytes
from redline.formulas.tp_traffic import peer_areas
from redline.plan.cost_setup import Setup
from redline.units import GIB

RUNTIME = 3 * GIB // 2  # CUDA context, NCCL's buffers, cuBLAS' workspaces
FRAGMENTATION = 0.05  # of activations
HALF, SINGLE = 2, 4


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank of the fullest stage: those shared by all dp ranks, and of its own experts.

    `matrices` are those of both that lie in layers: what GEMMs in fp8 read.
    """

    dense: float
    expert: float
    matrices: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Predicted bytes of the fullest rank at its peak.

    Attributes:
        optimizer: main parameters and moments on the device.
        fp8_copies: casts of weights, kept through a step.
        activations_attention, activations_mlp: of all microbatches in flight.
        fragmentation: what the allocator keeps beside them.
        runtime: the device's context, NCCL's and cuBLAS' buffers.
        areas: that tensor-parallel peers write.
    """

    weights: float
    gradients: float
    optimizer: float
    fp8_copies: float
    activations_attention: float
    activations_mlp: float
    logits: float
    fragmentation: float
    runtime: float
    areas: float

    @property
    def activations(self) -> float:
        """Saved for backward."""
        return self.activations_attention + self.activations_mlp

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(getattr(self, name) for name in self.__slots__))

    def as_dict(self) -> dict[str, Any]:
        """Plain values with the total, for JSON."""
        return {name: round(getattr(self, name)) for name in self.__slots__} | {"total": round(self.total)}


def rank_parameters(setup: Setup) -> RankParameters:
    """Parameters on the fullest rank: the first stage of a pipeline (embedding) or the last (head)."""
    return _rank_parameters(setup)


@lru_cache(maxsize=64)
def _rank_parameters(setup: Setup) -> RankParameters:
    shape, grid = setup.shape, setup.grid
    sizes = {"split": 0, "whole": 0, "vocab": 0, "expert": 0, "end": 0}
    for tensor in logical_tensors(shape):
        if tensor.split == "vocab":
            sizes["vocab"] += tensor.numel
        elif tensor.part == "embedding":
            sizes["end"] += tensor.numel
        elif tensor.split == "expert":
            sizes["expert"] += tensor.numel
        else:
            sizes["whole" if tensor.split == "replicated" else "split"] += tensor.numel
    share = setup.layers_per_stage / shape.num_layers if grid.pp > 1 else 1.0
    vocab = sizes["vocab"] / grid.tp
    if grid.pp > 1 and not shape.tied:
        vocab /= 2  # embedding on the first stage, head on the last
    dense = (sizes["split"] / grid.tp + sizes["whole"]) * share + vocab + sizes["end"]
    expert = sizes["expert"] * share / (grid.ep * grid.etp)
    return RankParameters(dense, expert, sizes["split"] / grid.tp * share + expert)


def rank_memory(setup: Setup) -> RankMemory:
    """Peak bytes of the fullest rank."""
    held, grid = rank_parameters(setup), setup.grid
    shards = setup.shard_ranks
    expert_shards = max(1, shards * grid.tp // (grid.ep * grid.etp))
    cut = {
        "weights": setup.sharding == "parameters",
        "gradients": setup.sharding in ("parameters", "gradients"),
        "optimizer": setup.sharding != "none",
    }
    item = {"fp32": 4, "fp64": 8}.get(setup.dtype, 2)
    size = {
        "weights": item,
        "gradients": setup.grad_bytes if item == HALF else item,
        "optimizer": optimizer_state_bytes(setup.states) * (1 - setup.states.away),
    }
    state = {
        name: size[name]
        * (held.dense / (shards if cut[name] else 1) + held.expert / (expert_shards if cut[name] else 1))
        for name in size
    }
    state["weights"] -= _saved_by_fp8(setup, held)
    # The first stage holds the most microbatches, the last one the logits.
    logits = logits_bytes(setup) if grid.pp == 1 else 0.0
    kept = _kept(setup, in_flight(setup))
    copies = setup.fp8_copies * held.matrices
    return RankMemory(**state, **kept, fp8_copies=copies, logits=logits, runtime=RUNTIME, areas=_areas(setup))


def _saved_by_fp8(setup: Setup, held: RankParameters) -> float:
    """Bytes of the weights that matrices of GEMMs in fp8 do not take where they have no other copy."""
    stored = setup.gather_bytes < HALF
    return stored * held.matrices / (setup.shard_ranks if setup.sharding == "parameters" else 1)


def _areas(setup: Setup) -> float:
    """Memory beside the allocator that tensor-parallel peers write."""
    turn = setup.tokens * setup.shape.hidden * HALF
    return sum(peer_areas(turn, setup.grid.tp, setup.joined).values())


def _kept(setup: Setup, flying: float) -> dict[str, float]:
    """Activations by part of so many chunks in flight, and what the allocator keeps beside them."""
    attention, mlp = (flying * size for size in chunk_bytes(setup))
    fragmentation = FRAGMENTATION * (attention + mlp)
    return {"activations_attention": attention, "activations_mlp": mlp, "fragmentation": fragmentation}


def stage_memories(setup: Setup) -> tuple[RankMemory, ...]:
    """Peak bytes of a rank of every pipeline stage, the first to the last.

    The first holds the embedding and the most microbatches in flight, the last the head and the logits.
    """
    pp, whole = setup.grid.pp, rank_memory(setup)
    if pp == 1:
        return (whole,)
    held, shape = rank_parameters(setup), setup.shape
    body = held.dense + held.expert
    vocab = shape.padded_vocab_size * shape.hidden / setup.grid.tp
    spared, found = _saved_by_fp8(setup, held), []
    for stage in range(pp):
        ends = stage in (0, pp - 1)  # a tied embedding stands on both
        share = 1.0 if ends or not body else max(0.0, 1 - vocab / body)
        flying = in_flight(setup) if setup.vpp > 1 else min(setup.num_microbatches, pp - stage)
        found.append(
            RankMemory(
                weights=(whole.weights + spared) * share - spared,
                gradients=whole.gradients * share,
                optimizer=whole.optimizer * share,
                fp8_copies=whole.fp8_copies,
                **_kept(setup, flying),
                logits=logits_bytes(setup) if stage == pp - 1 else 0.0,
                runtime=whole.runtime,
                areas=whole.areas,
            )
        )
    return tuple(found)


def in_flight(setup: Setup) -> float:
    """Chunks of layers (a stage's, or a virtual stage's) whose activations the first stage holds at most."""
    pp, vpp, M = setup.grid.pp, setup.vpp, setup.num_microbatches
    if pp == 1:
        return 1.0
    if vpp > 1:
        return min(M * vpp, pp * vpp + pp - 1)
    return min(M, pp)


def chunk_bytes(setup: Setup) -> tuple[float, float]:
    """Activations of one microbatch in one chunk of layers: attention and inputs of units, and MLP."""
    layers = setup.layers_per_stage / setup.vpp
    each, inputs = layers, 0.0
    boundary = setup.tokens * setup.shape.hidden * HALF
    boundary /= setup.grid.tp if setup.sequence_parallel else 1
    boundary /= setup.grid.tp if setup.spread_inputs else 1
    if setup.recompute == "full" and setup.recompute_method == "block":
        inputs = min(layers, setup.recompute_layers)
        each = layers - inputs
    elif setup.recompute == "full":
        inputs = -(-layers // setup.recompute_layers)
        each = min(layers, setup.recompute_layers)
    attention, mlp = layer_bytes(setup)
    return inputs * boundary + each * attention, each * mlp


def layer_activation_bytes(setup: Setup, recompute_modules: tuple[str, ...] | None = None) -> float:
    """Bytes one layer keeps of one microbatch on one rank (full recompute left aside)."""
    return sum(layer_bytes(setup, recompute_modules))


def layer_bytes(setup: Setup, recompute_modules: tuple[str, ...] | None = None) -> tuple[float, float]:
    """The same, of its attention and of its MLP."""
    shape, tp, T = setup.shape, setup.grid.tp, setup.tokens
    modules = setup.recompute_modules if recompute_modules is None else recompute_modules
    moe = bool(shape.num_experts) and any(is_moe(shape, layer) for layer in range(shape.num_layers))
    fused = setup.impl != "local"
    H, F1, F = shape.hidden, shape.fc1_size, shape.ffn
    if moe:
        wide = shape.moe_topk * shape.moe_ffn + shape.moe_shared_ffn
        F1, F = (2 if shape.gated else 1) * wide, wide
    operand = 1 if setup.fp8 else HALF
    outer = H * HALF + H * operand  # of either part: norm input, norm output
    outer += H if shape.hidden_dropout else 0
    if not fused:
        outer += H * SINGLE
    outer_mlp = outer
    inner = (shape.q_size + 2 * shape.kv_size) * HALF + shape.q_size * HALF
    mlp: float = F1 * HALF + F * operand
    if moe:
        mlp += shape.moe_topk * H * HALF
    if not fused and not setup.fused_activation and shape.gated:
        mlp += 2 * F * HALF
    if "activation" in modules:
        mlp = F1 * HALF
    whole_mlp = "mlp" in modules or ("moe" in modules and moe)
    if whole_mlp:
        mlp, outer_mlp = 0.0, outer - H * operand
    if "layernorm" in modules and setup.impl != "transformer_engine":  # whose norms are inside its linears
        outer -= H * operand
        outer_mlp -= 0 if whole_mlp else H * operand
    scores = 0.0
    if setup.attention == "unfused" and "core_attn" not in modules:
        each = 2 * HALF + (HALF + 1 if shape.attention_dropout else 0)
        scores = shape.num_heads * setup.seq_length * each
    split = tp if setup.sequence_parallel else 1
    return T * (outer / split + (inner + scores) / tp), T * (outer_mlp / split + mlp / tp)


def logits_bytes(setup: Setup) -> float:
    """Logits and what the loss makes of them."""
    each = 2 * HALF if setup.fused_loss else 2 * HALF + SINGLE
    return setup.tokens * setup.shape.padded_vocab_size / setup.grid.tp * each
