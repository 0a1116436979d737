"""Everything that follows from a config, a machine, a vocabulary and a number of ranks, as one frozen value.

Pure: nothing is opened, allocated or measured. The trainer runs by it, `redline memory` prints it, and the
planner makes thousands of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from redline.choice import Choice
from redline.config import OptimConfig, RunConfig, TrainConfig, batch_schedule, packs
from redline.formulas.activations import MicrobatchShape
from redline.formulas.flops import CONVENTIONS, Convention, TokenFlops, flops_per_token
from redline.formulas.memory import MemoryEstimate, training_memory
from redline.formulas.operators import Operator
from redline.formulas.params import ParameterCount, count_parameters
from redline.formulas.recompute import NOTHING, Module
from redline.formulas.resolve import shape_of
from redline.formulas.shape import ModelShape
from redline.formulas.state import StateDtypes
from redline.hardware import Hardware
from redline.plan.batch import START, BatchSchedule, Reached, make_batch_schedule, ramp_up
from redline.plan.cost_setup import joined_by
from redline.plan.data_parallel import DataParallelPlan, plan_data_parallel
from redline.plan.dtypes import choose_precision, state_dtypes, storage_choice
from redline.plan.fp8 import Fp8Plan, plan_fp8
from redline.plan.grid import RankGrid, make_grid
from redline.plan.kernels import Conditions, choose_kernels
from redline.plan.lr import LrSchedule, ScheduleSpec, WeightDecaySchedule
from redline.plan.optimizer_offload import optimizer_offload_choice
from redline.plan.recompute import (
    RecomputeCost,
    RecomputeSearch,
    offload_choice,
    recompute_choice,
    recompute_cost,
    recompute_search,
    stated_recompute,
)
from redline.plan.rules import broken


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """When and how much a run evaluates.

    Attributes:
        iterations: global batches of one evaluation; 0 never evaluates.
        interval: steps between evaluations, None for one at the end.
        global_batch_size, num_microbatches: of each batch (ramp-up plays no part).
        samples: of one evaluation. Every one of a run sees the same samples of its split, so that their
            losses compare (Megatron moves on through the split).
    """

    iterations: int
    interval: int | None
    global_batch_size: int
    num_microbatches: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, decided.

    Attributes:
        shape: the model, every default resolved.
        parameters: how many it has.
        grid: which rank holds what.
        data_parallel: how the ranks along dp share gradients and optimizer states.
        precision: name of the recipe: "bf16" "fp16" "fp32" "fp64"; also the compute and parameter dtype.
        fp8: which GEMMs run in fp8; None when all run in the compute dtype.
        dtypes: storage of parameters, gradients and optimizer state.
        seq_length: tokens of a sample.
        batch: batch sizes, microbatches, iterations.
        schedule: learning rate and weight decay over samples.
        evaluation: when and how much.
        microbatch: what decides the size of activations.
        memory: predicted peak of a rank.
        flops: model FLOPs of a token in each convention.
        choices: what was chosen for every `auto` so far; build adds its own.
        search: what `--recompute auto` decides by, once the kernels are known; None where it is stated.
        recompute_cost: predicted time of recomputing.
    """

    shape: ModelShape
    parameters: ParameterCount
    grid: RankGrid
    data_parallel: DataParallelPlan
    precision: str
    fp8: Fp8Plan | None
    dtypes: StateDtypes
    seq_length: int
    batch: BatchSchedule
    schedule: ScheduleSpec
    evaluation: EvalPlan
    microbatch: MicrobatchShape
    memory: MemoryEstimate
    flops: Mapping[Convention, TokenFlops]
    choices: tuple[Choice, ...]
    search: RecomputeSearch | None
    recompute_cost: RecomputeCost

    def with_implementation(
        self, attention: str, fused: frozenset[Operator], kept: frozenset[Module] = frozenset()
    ) -> Plan:
        """The plan with the attention and the kernels that build has chosen, and the memory they need.

        kept: modules that these cannot drop.
        """
        recompute, search = self.microbatch.recompute, self.search
        recompute = replace(recompute, modules=recompute.modules - kept)
        if search is not None:
            search = replace(search, modules=tuple(each for each in search.modules if each not in kept))
        microbatch = replace(self.microbatch, attention=attention, fused=fused, recompute=recompute)
        return replace(self, search=search)._with_memory(microbatch)

    def _with_memory(self, microbatch: MicrobatchShape) -> Plan:
        """The plan with this microbatch: what is recomputed, and the memory that leaves."""
        shape, dtypes, choice = self.shape, self.dtypes, None
        if self.search is not None:
            found, choice = self.search.best(shape, microbatch, dtypes)
            microbatch = replace(microbatch, recompute=found)
        memory = training_memory(shape, microbatch, dtypes)
        if choice is None and microbatch.recompute != NOTHING:
            plain = training_memory(shape, replace(microbatch, recompute=NOTHING), dtypes)
            choice = recompute_choice(
                microbatch.recompute, self.recompute_cost, plain.total - memory.total, shape.num_layers
            )
        choices = tuple(each for each in self.choices if each.what not in ("recompute", "activation-offload"))
        choices += offload_choice(microbatch, memory, self.recompute_cost)
        choices += () if choice is None else (choice,)
        return replace(self, microbatch=microbatch, memory=memory, choices=choices)

    def tokens_per_step(self, consumed_samples: int) -> int:
        """Tokens of the step that starts after `consumed_samples` sequences, over all ranks."""
        return self.batch.global_batch_size(consumed_samples) * self.seq_length


def make_plan(
    config: RunConfig,
    hardware: Hardware,
    vocab_size: int,
    world_size: int = 1,
    reached: Reached = START,
) -> Plan:
    """Decide everything that can be decided without building the model.

    Args:
        vocab_size: true size of the tokenizer's vocabulary.
        world_size: ranks in all.
        reached: where a resumed run stands.

    Raises: ConfigError when the numbers do not fit together; the message cites the rule.
    """
    grid = plan_grid(config, world_size)
    seq_length = config.train.seq_length
    shape = shape_of(config.model, seq_length, vocab_size, grid.tp, moe=config.moe, mtp=config.mtp)
    _check_split(shape, grid.tp)
    precision = choose_precision(config.precision, hardware)
    dtypes = state_dtypes(precision.ran, config.precision, config.optim)
    fp8 = plan_fp8(config, shape.of_rank(grid.tp), hardware, shape.padded_vocab_size // grid.tp)
    batch = plan_batch(config.train, grid.dp, reached)
    parameters = count_parameters(shape)
    ranks = plan_data_parallel(config.parallel, config.overlap, dp=grid.dp, parameters=parameters.total)
    dtypes = replace(
        dtypes,
        shards=ranks.rule.ranks if ranks.sharded else 1,
        wide_sum=ranks.wide_sum,
        snapshot_ranks=grid.dp if config.checkpoint.async_save else 0,
        snapshot_moments=config.checkpoint.save_optim,
    )
    expected = Conditions(device=hardware.kind, precision=precision.ran, attention="unfused")
    packed = packs(config.data)  # the samples of a microbatch then lie in one row
    microbatch = MicrobatchShape(
        seq_length=seq_length * (config.train.micro_batch_size if packed else 1),
        micro_batch_size=1 if packed else config.train.micro_batch_size,
        dtype=precision.ran,
        attention=expected_attention(config, hardware, precision.ran),
        device=hardware.kind,
        fuse_wgrad=config.kernels.gradient_accumulation_fusion,
        grad_dtype=dtypes.grad,
        segments=config.data.reset_attention_mask or packed,
        tp=grid.tp,
        sequence=config.parallel.sequence_parallel,
        joined=joined_by(config),
        fp8=fp8 is not None and config.precision.fp8_wgrad,
        fp8_weights=fp8.weights if fp8 else 0,
        fp8_copies=fp8.copies if fp8 else 0,
        fp8_stored=fp8 is not None and fp8.stored,
        fp8_head=fp8.head if fp8 else 0,
        fp8_blocks=config.precision.fp8_recipe in ("blockwise", "mxfp8"),
        fp8_measures=config.precision.fp8_recipe == "tensorwise",
        fp8_sites=frozenset(fp8.sites if fp8 else ()),
        fp8_linked=fp8 is not None and config.overlap.tp_comm_overlap,
        accumulates=batch.final_batch_size > config.train.micro_batch_size * grid.dp,
        fused=choose_kernels(config.kernels, shape, expected).fused,
        recompute=stated_recompute(config),
        z_loss=config.train.z_loss > 0.0,
        offload_layers=config.recompute.cpu_offloading_num_layers,
    )
    cost = recompute_cost(config, hardware, vocab_size, world_size)
    memory = training_memory(shape, microbatch, dtypes)
    plan = Plan(
        shape=shape,
        parameters=parameters,
        grid=grid,
        data_parallel=ranks,
        precision=precision.ran,
        fp8=fp8,
        dtypes=dtypes,
        seq_length=seq_length,
        batch=batch,
        schedule=plan_schedule(config.optim, config.train, batch),
        evaluation=plan_evaluation(config.train, batch),
        microbatch=microbatch,
        memory=memory,
        flops=MappingProxyType({name: flops_per_token(shape, seq_length, name) for name in CONVENTIONS}),
        choices=(
            precision,
            *storage_choice(precision.ran, config.optim),
            *ranks.choices,
            *(fp8.choices if fp8 else ()),
            *optimizer_offload_choice(config.optim, memory, hardware),
        ),
        search=recompute_search(config, hardware, cost),
        recompute_cost=cost,
    )
    return plan._with_memory(microbatch)


def plan_grid(config: RunConfig, world_size: int) -> RankGrid:
    """The ranks as the config arranges them."""
    parallel = config.parallel
    return make_grid(
        world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        pp_before_dp=parallel.use_tp_pp_dp_mapping,
    )


def _check_split(shape: ModelShape, tp: int) -> None:
    """Raises ConfigError unless tensor-parallel ranks can hold equal parts of the MLP and the vocabulary."""
    for rule, flag, size, what in (
        ("tp-divides-ffn", "--ffn-hidden-size", shape.ffn, "ffn features"),
        ("tp-divides-vocabulary", "--padded-vocab-size", shape.padded_vocab_size, "rows of the vocabulary"),
    ):
        if size % tp:
            raise broken(
                rule,
                f"--tensor-model-parallel-size {tp} cannot split {flag} {size}.",
                f"each tp rank holds the same number of {what}.",
                f"use {(size // tp + 1) * tp}, or another number of ranks.",
                "--tensor-model-parallel-size",
                flag,
            )


def plan_batch(train: TrainConfig, dp: int, reached: Reached = START) -> BatchSchedule:
    """Batch sizes over the run, from whichever options state them.

    Args:
        reached: where a resumed run stands. Where its steps took other batches than the options of now say,
            what is left of --train-samples or --train-iters is trained on in steps of now.
    """
    if train.train_iters is None and train.train_samples is None:
        raise broken(
            "length-stated",
            "neither --train-iters nor --train-samples is given.",
            "a run has an end.",
            "state one, for example --train-iters 1000.",
            "--train-iters",
            "--train-samples",
        )
    make = partial(
        make_batch_schedule,
        _batch_thresholds(train, dp),
        micro_batch_size=train.micro_batch_size,
        dp=dp,
        train_iters=train.train_iters,
        train_samples=train.train_samples,
        decrease_if_needed=train.decrease_batch_size_if_needed,
    )
    schedule = make()
    same = schedule.samples_at(reached.iteration) == reached.samples
    same &= not reached.segments or schedule.until(reached.iteration) == reached.segments
    return schedule if same else make(reached=reached)


def _batch_thresholds(train: TrainConfig, dp: int) -> list[tuple[int, int]]:
    """(consumed samples, global batch size from there on)."""
    if train.step_batch_size_schedule is not None:
        steps = batch_schedule(train.step_batch_size_schedule)
        if steps is None:
            raise broken(
                "batch-schedule",
                f'--step-batch-size-schedule "{train.step_batch_size_schedule}" is no schedule.',
                "it is a list of TOKENS:SIZE that starts at 0 tokens and rises.",
                'write for example "0:768 250B:1536".',
                "--step-batch-size-schedule",
            )
        return [(-(-tokens // train.seq_length), size) for tokens, size in steps]
    final = train.global_batch_size or train.micro_batch_size * dp
    if train.rampup_batch_size is not None:
        return ramp_up(*train.rampup_batch_size, final)
    return [(0, final)]


def plan_schedule(optim: OptimConfig, train: TrainConfig, batch: BatchSchedule) -> ScheduleSpec:
    """Learning rate and weight decay, every length turned into samples."""
    run = train.train_samples or batch.total_samples
    decay = _samples(optim.lr_decay_iters, optim.lr_decay_samples, batch) or run
    warmup: float = _samples(optim.lr_warmup_iters, optim.lr_warmup_samples, batch)
    if optim.lr_warmup_fraction is not None:
        warmup = optim.lr_warmup_fraction * decay
    main = LrSchedule(
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        init_lr=optim.lr_warmup_init,
        style=optim.lr_decay_style,
        warmup=warmup,
        decay=decay,
        wsd_style=optim.lr_wsd_decay_style,
        wsd_decay=_last_samples(optim.lr_wsd_decay_iters, decay, batch) or optim.lr_wsd_decay_samples or 0,
    )
    decoupled = None
    if (peak := optim.decoupled_lr) is not None:
        least = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
        decoupled = replace(main, max_lr=peak, min_lr=min(least, peak), init_lr=min(main.init_lr, peak))
    constant = optim.weight_decay_incr_style == "constant"
    start, end = (optim.weight_decay if constant else value for value in _ends(optim))
    decays = WeightDecaySchedule(start=start, end=end, style=optim.weight_decay_incr_style, length=run)
    return ScheduleSpec(main=main, decay=decays, decoupled=decoupled)


def _ends(optim: OptimConfig) -> tuple[float, float]:
    """Weight decay at the start and at the end."""
    ends = (optim.start_weight_decay, optim.end_weight_decay)
    start, end = (optim.weight_decay if value is None else value for value in ends)
    return start, end


def _samples(iterations: int | None, samples: int | None, batch: BatchSchedule) -> int:
    """A length stated in iterations or in samples; 0 when neither is."""
    return batch.samples_at(iterations) if iterations else samples or 0


def _last_samples(iterations: int | None, end: int, batch: BatchSchedule) -> int:
    """What the last `iterations` steps of the first `end` samples take; 0 when they are not stated."""
    last = batch.iteration_at(end)
    if not iterations or iterations > last:  # longer than that is refused
        return batch.samples_at(iterations or 0)
    return batch.samples_at(last) - batch.samples_at(last - iterations)


def plan_evaluation(train: TrainConfig, batch: BatchSchedule) -> EvalPlan:
    """When a run evaluates, and on how much."""
    size = batch.final_batch_size
    return EvalPlan(
        iterations=train.eval_iters,
        interval=train.eval_interval,
        global_batch_size=size,
        num_microbatches=size // (batch.micro_batch_size * batch.dp),
        samples=train.eval_iters * size,
    )


def expected_attention(
    config: RunConfig, hardware: Hardware, dtype: str
) -> Literal["unfused", "flash", "fused", "local"]:
    """The backend a prediction assumes until build has chosen; "flash" is any that keeps no scores."""
    asked = config.attention.attention_backend
    if asked != "auto":
        return asked
    model, narrow = config.model, dtype in ("bf16", "fp16")
    beyond_flash = model.attention_dropout > 0 or config.data.reset_attention_mask
    if hardware.kind == "cpu":  # PyTorch's flash kernel, which is plain or causal only
        plain = model.window_size is None and not model.attn_logit_softcapping and not packs(config.data)
        plain &= model.softmax_type == "vanilla"
        return "flash" if plain and not beyond_flash else "unfused"
    if not narrow:
        return "unfused"
    return "local" if beyond_flash else "flash"
