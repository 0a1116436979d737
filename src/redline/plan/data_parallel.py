"""How data-parallel ranks share gradients and optimizer states, every default resolved."""

from __future__ import annotations

from dataclasses import dataclass, field

from redline.choice import Choice
from redline.config import OverlapConfig, ParallelConfig
from redline.formulas.buckets import BucketRule, default_bucket_size
from redline.plan.rules import broken


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelPlan:
    """Of one run.

    Attributes:
        rule: how flat buffers are cut into buckets, and by how many ranks these are shared.
        instances: groups of ranks that each hold all optimizer states, if these are sharded.
        sharded: main parameters and moments exist on their owner alone (`--use-distributed-optimizer`).
        overlap_reduce: gradients are reduced during the last backward pass.
        overlap_gather: parameters are gathered during the next forward pass.
        wide_sum: half-precision gradients are sent as they are and summed in fp32.
    """

    rule: BucketRule = field(default_factory=BucketRule)
    instances: int = 1
    sharded: bool = False
    overlap_reduce: bool = False
    overlap_gather: bool = False
    wide_sum: bool = False

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What to say of it; nothing on one rank."""
        ranks = self.rule.ranks
        if ranks * self.instances == 1:
            return ()
        several = f", {self.instances} times over" if self.instances > 1 else ""
        states = f"each of {ranks} ranks holds and updates its own part{several}"
        if not self.sharded or ranks == 1:
            states = "whole on every rank"
        size = "one bucket" if self.rule.size is None else f"buckets of {self.rule.size:,} elements"
        during = "sent during the backward pass" if self.overlap_reduce else "sent after the backward pass"
        gather = "during the next forward pass" if self.overlap_gather else "after the step"
        reduced = "reduce-scatter" if self.sharded and ranks > 1 else "all-reduce"
        if self.wide_sum:
            reduced = "all-to-all, summed in fp32"
        if ranks > 1 and self.instances > 1:
            reduced = f"{reduced}, then all-reduce across instances"
            during = f"{during}, across once summed inside"
        held = "sharded" if self.sharded and ranks > 1 else "replicated"
        shown = Choice("optimizer-states", "auto", held, states)
        grads = Choice("gradients", "auto", reduced, f"{size}, {during}")
        if not self.sharded or ranks == 1:
            return shown, grads
        return shown, grads, Choice("parameters", "auto", "all-gather", f"bucket by bucket, {gather}")


def plan_data_parallel(
    parallel: ParallelConfig, overlap: OverlapConfig, *, dp: int, parameters: int
) -> DataParallelPlan:
    """Decide.

    Args:
        parameters: stored on this rank.

    Raises: ConfigError when the ranks cannot be grouped as asked.
    """
    instances, sharded = parallel.num_distributed_optimizer_instances, parallel.use_distributed_optimizer
    if dp % instances:
        raise broken(
            "instances-divide-ranks",
            f"--num-distributed-optimizer-instances {instances} does not divide {dp} data-parallel "
            f"rank{'s' * (dp > 1)}.",
            "each instance is a group of ranks that share the optimizer states.",
            f"use a divisor of {dp}.",
            "--num-distributed-optimizer-instances",
        )
    asked = overlap.overlap_grad_reduce
    overlap_reduce = dp > 1 and (asked is None or asked)
    gathers = overlap.overlap_param_gather
    overlap_gather = overlap_reduce and sharded and (gathers is None or gathers)
    size = overlap.ddp_bucket_size
    if size is None and overlap.ddp_num_buckets is not None:
        size = max(1, parameters // overlap.ddp_num_buckets)
    if size is None and overlap_reduce:
        size = default_bucket_size(dp)
    return DataParallelPlan(
        rule=BucketRule(size=size, ranks=dp // instances, busbw=overlap.ddp_pad_buckets_for_high_nccl_busbw),
        instances=instances,
        sharded=sharded,
        overlap_reduce=overlap_reduce,
        overlap_gather=overlap_gather,
        wide_sum=overlap.ddp_reduce_scatter_with_fp32_accumulation,
    )
