"""Megatron's own estimates, to the digit: for comparison in reports and for reading other people's numbers.

They are not our formulas. Its FLOPs take the padded vocabulary and count attention at half; its memory knows
no flash attention, no context parallelism, no full recompute, no biases, positions or q/k norms, and of a
prediction head only the layer. Megatron-LM: num_floating_point_operations and theoretical_memory_usage.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.formulas.params import is_moe
from redline.formulas.shape import ModelShape

SLACK = 1.05  # its allowance for fragmentation where it does not trust its activation formula


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """What its memory report reads of a launch. `etp` None means tp; `dp` contains ep, as in its groups."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    num_microbatches: int | None = None
    distributed_optimizer: bool = False
    sequence_parallel: bool = False
    selective_recompute: bool = False


def megatron_flops_per_step(shape: ModelShape, seq_length: int, global_batch_size: int) -> int:
    """FLOPs of one step as Megatron's log counts them (attention at half, padded vocabulary)."""
    hidden, query = shape.hidden, shape.q_size
    tokens, depths = global_batch_size * seq_length, shape.mtp_num_layers
    moe = [is_moe(shape, layer) for layer in range(shape.num_layers)]
    moe += [moe[-1]] * depths
    matrices = 3 if shape.gated else 2
    dense_ffn = moe.count(False) * shape.ffn
    moe_ffn = moe.count(True) * (shape.moe_ffn * shape.moe_topk + shape.moe_shared_ffn)
    return 6 * tokens * (
        matrices * hidden * (dense_ffn + moe_ffn)
        + len(moe) * (hidden * (query + 2 * shape.kv_size) + query * hidden)
        + len(moe) * seq_length * query
        + depths * (3 * hidden + 2 * hidden * hidden)
        + hidden * shape.padded_vocab_size * (1 + depths)
    )  # fmt: skip


def megatron_weight_and_optimizer_bytes(shape: ModelShape, layout: MegatronLayout) -> float:
    """Bytes of weights, gradients and Adam on the fullest rank, by its report (bf16, fp32 gradients)."""
    hidden, heads, depths = shape.hidden, shape.num_heads, shape.mtp_num_layers
    matrices = 3 if shape.gated else 2
    attention = 2 * hidden * hidden * (1 + shape.num_groups / heads) * (shape.q_size / hidden)
    norm_count = 1 if shape.normalization == "RMSNorm" else 2
    norms = 2 * hidden * norm_count
    expert_ranks = layout.ep * (layout.tp if layout.etp is None else layout.etp)

    moe = [is_moe(shape, layer) for layer in range(shape.num_layers)]
    sharded, whole, experts = 0.0, 0.0, 0.0  # of the decoder
    mtp_sharded, mtp_whole, mtp_experts = 0.0, 0.0, 0.0
    for layer, has_experts in enumerate([*moe, *[moe[-1]] * depths]):
        mlp = matrices * hidden * (shape.moe_shared_ffn if has_experts else shape.ffn)
        of_experts = matrices * hidden * shape.moe_ffn * shape.num_experts if has_experts else 0
        of_router = hidden * shape.num_experts if has_experts else 0
        if layer < shape.num_layers:
            sharded, whole, experts = (
                sharded + attention + mlp,
                whole + norms + of_router,
                experts + of_experts,
            )
        else:
            mtp_sharded, mtp_whole = mtp_sharded + attention + mlp, mtp_whole + norms + of_router
            mtp_experts += of_experts
    whole += hidden * norm_count  # the final norm

    embedding = hidden * shape.padded_vocab_size
    dense = (sharded / layout.pp + mtp_sharded + embedding) / layout.tp + whole / layout.pp + mtp_whole
    if not shape.tied and layout.pp == 1:
        dense += embedding / layout.tp
    routed = (experts / layout.pp + mtp_experts) / expert_ranks
    expert_dp = layout.dp * layout.tp / expert_ranks
    return dense * _bytes(layout, layout.dp) + routed * _bytes(layout, expert_dp)


def megatron_activation_bytes(
    shape: ModelShape, seq_length: int, micro_batch_size: int, layout: MegatronLayout
) -> float:
    """Bytes of activations on the first pipeline stage, by Megatron's report."""
    hidden, tp, pp = shape.hidden, layout.tp, layout.pp
    tokens = seq_length * micro_batch_size
    trusted = layout.sequence_parallel and layout.selective_recompute
    per_layer = tokens * hidden * (18 + 4 * shape.ffn / hidden if trusted else 10 + 24 / tp)
    total = per_layer * shape.num_layers + 8 * tokens * pp + tokens * hidden * pp
    if layout.vpp > 1:
        total *= 1 + (pp - 1) / (pp * layout.vpp)
    elif pp > 1 and layout.num_microbatches is not None:
        total *= min(1.0, layout.num_microbatches / pp)
    vocab = shape.padded_vocab_size
    if trusted:
        head = 4 * tokens * hidden * (1 + vocab / hidden) if pp == 1 else 0
        return (total + head) / tp
    head = 2 * (tokens * vocab / tp + tokens * hidden) if pp == 1 else 0
    return (total + head) * SLACK


def _bytes(layout: MegatronLayout, dp: float) -> float:
    return 6 + 12 / dp if layout.distributed_optimizer else 18
