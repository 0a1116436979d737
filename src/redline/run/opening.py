"""Everything a run needs before its first step, opened in order; nothing is written yet."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from redline.attention import Calibration
from redline.build import (
    CompileLog,
    assemble,
    choose_attention,
    compile_blocks,
    open_device,
    set_communication,
)
from redline.choice import Choice
from redline.comm import (
    Groups,
    Pace,
    Progress,
    Watchdog,
    World,
    close_world,
    first_then_all,
    open_groups,
    together,
    write_flight_record,
)
from redline.config import (
    Environment,
    Parsed,
    RunConfig,
    notices,
    raise_problems,
    value_of,
)
from redline.config.tree import options_by_field
from redline.data import DataSplits, Microbatch, StdlibCorpus
from redline.errors import ConfigError
from redline.hardware import Hardware, detect, with_measured_peak
from redline.plan import START, Plan, ScheduleSpec, complaints, make_plan
from redline.plan.fp8 import BESIDE_FP8
from redline.run.batches import step_batches
from redline.run.data import data_prefixes, demo_corpus, open_run_data, wants_demo_corpus
from redline.run.fp8 import choices_now
from redline.run.memory import MemoryMeter, out_of_memory_explained, warnings_of_memory
from redline.run.ranks import choose_backend, collective_timeout_s, join_ranks
from redline.run.restart import Rollback, rollback_of
from redline.run.resume import (
    Start,
    changed_options,
    fp8_changes,
    other_batches,
    other_data,
    restore,
    resumed_schedules,
)
from redline.run.start import open_start, require_same_step
from redline.run.vocabulary import open_vocabulary
from redline.step import TrainState, TrainStep
from redline.units import format_bytes, format_count

Say = Callable[[str], object]

SENDING = (  # options of what data-parallel ranks send
    "overlap_grad_reduce",
    "overlap_param_gather",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "ddp_pad_buckets_for_high_nccl_busbw",
)
MOST_PARTS = 20  # data sets that are listed at the start


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that is ready to step.

    Attributes:
        config: with the checkpoint's model shape, if that was asked for.
        groups: the ranks it runs on; local_ranks: how many of all share this host.
        progress: where this rank stands; watchdog: tells the others.
        schedules: the plan's, or the resumed checkpoint's.
        corpus: the demo corpus, None with other data.
        start: the checkpoint it began with; rollback: of a run that went back to it in its own folder.
        compiled: what torch.compile has made so far; None for an eager run.
        choices: every decision taken on the way, with its reason.
        say: called with one sentence for each thing the user should know.
    """

    config: RunConfig
    groups: Groups
    local_ranks: int
    progress: Progress
    watchdog: Watchdog
    device: torch.device
    hardware: Hardware
    plan: Plan
    schedules: ScheduleSpec
    splits: DataSplits
    corpus: StdlibCorpus | None
    state: TrainState
    meter: MemoryMeter
    start: Start | None
    rollback: Rollback | None
    compiled: CompileLog | None
    choices: tuple[Choice, ...]
    say: Say

    @property
    def resumes(self) -> bool:
        """Whether it goes on from an earlier part of itself."""
        return self.start is not None and not self.start.weights_only

    def make_step(self) -> TrainStep:
        """The optimizer step as the options want it."""
        train, graph = self.config.train, self.config.compile
        return TrainStep(
            self.state,
            self.schedules,
            seed=train.seed,
            device=self.device,
            empty_cache_level=train.empty_unused_memory_level,
            z_loss=train.z_loss,
            graph_warmup_steps=None if graph.cuda_graph_impl == "none" else graph.cuda_graph_warmup_steps,
            fp8_stats_interval=self.config.precision.fp8_stats_interval,
            say=self.say,
            dp=self.groups.dp,
            progress=self.progress,
            after_forward=self.meter.after_forward,
        )

    def close(self) -> None:
        """Leave the other ranks, once all of them are done; nothing to do on one process."""
        together(self.groups.control, self.state.optimizer.settle)
        close_world()

    def batches(self) -> Generator[list[Microbatch], None, None]:
        """The microbatches of every step that is left; closing it stops the threads that make them."""
        made = step_batches(
            self.splits.train,
            self.plan.batch,
            self.state.consumed_samples,
            num_workers=self.config.data.num_workers,
            dp_rank=self.groups.dp.index,
        )
        with closing(made):
            while True:
                self.progress.step = self.state.iteration + 1
                self.progress.begins("preparing data")
                microbatches = next(made, None)
                if microbatches is None:
                    return
                yield microbatches


def open_run(parsed: Parsed, environment: Environment, say: Say) -> OpenRun:
    """Open device, data, model and checkpoint.

    Args:
        say: called, on the first rank, with one sentence for each thing the user should know.

    Raises: RedlineError for whatever cannot be obeyed; no file has been changed then.
    """
    raise_problems(environment.problems())
    say = say if environment.rank == 0 else _silent
    config = parsed.config
    for notice in (*parsed.notices, *notices(config)):
        say(notice)
    communication = set_communication(config, environment)
    device, device_choices = open_device(
        config.runtime,
        environment,
        deterministic=config.train.deterministic_mode,
        empty_cache_level=config.train.empty_unused_memory_level,
        graphs=config.compile.cuda_graph_impl != "none",
    )
    _say_environment(config, environment, device, say)
    world, backend = join_ranks(config, environment, device)
    config, start = open_start(world.control, parsed, say)
    leads = environment.local_rank == 0  # of its machine: makes what the others then find on disk
    demo = None
    if wants_demo_corpus(config):
        demo = first_then_all(world.control, leads, lambda: demo_corpus(environment, say))
    vocabulary = together(world.control, lambda: open_vocabulary(config, data_prefixes(config, demo)))
    for notice in vocabulary.notices:
        say(notice)
    hardware = detect(device.type)

    def planned() -> Plan:
        reached = START if start is None else start.reached
        plan = make_plan(config, hardware, vocabulary.size, environment.world_size, reached)
        _check_graphs(config, plan)
        _check_profile(config, plan, environment.world_size)
        return plan

    plan = together(world.control, planned)
    _say_idle(config, plan, say)
    progress = Progress(pace=Pace(device) if config.logging.log_straggler else None)
    groups = _open_groups(config, world, plan, progress)
    if device.type == "cpu" and groups.rank == 0:  # no data sheet: the peak is what a matrix product reaches
        hardware = with_measured_peak(hardware, plan.precision)
    if groups.rank == 0:
        for warning in warnings_of_memory(config, plan, hardware, environment.local_world_size):
            say(warning)
    splits = first_then_all(
        world.control, leads, lambda: open_run_data(config, plan, vocabulary, environment, demo, say)
    )
    meter = MemoryMeter(device)
    calibration = Calibration(environment.cache_dir / "calibration.json", say)
    attention = first_then_all(  # one rank of a machine measures, and the others read what it wrote
        world.control, leads, lambda: choose_attention(config, plan, device, calibration)
    )
    with out_of_memory_explained(config, plan, hardware, environment.local_world_size):
        assembly = together(
            world.control,
            partial(
                assemble,
                config,
                plan,
                device,
                attention,
                groups=groups,
                interpret=environment.triton_interpret,
            ),
        )
    plan = assembly.plan
    state = TrainState(assembly.model, assembly.optimizer, fp8=assembly.fp8)
    schedules = plan.schedule
    if start is not None:
        together(
            groups.control,
            partial(
                restore,
                state,
                start,
                load_optim=config.checkpoint.load_optim,
                shape_taken=config.checkpoint.use_checkpoint_args,
                narrower_moments=config.optim.use_precision_aware_optimizer,
                group=groups.control.handle,
            ),
        )
        require_same_step(groups.control, start, state)
        schedules, lines = resumed_schedules(config, plan.schedule, start)
        if groups.rank == 0:
            lines = [*other_batches(plan.batch, state), *other_data(splits.train, start), *lines]
        _say_start(config, start, state, lines, say)
    compiled, compile_choices = _compiled(config, state, device, environment, say)
    meter.forget_peak()
    choices = (*device_choices, *communication, *backend, *plan.choices, *assembly.choices, *compile_choices)
    _introduce(plan, choices_now(choices, plan.fp8, state.returned), splits, say)
    _say_no_table(config, plan, state, say)
    return OpenRun(
        config=config,
        groups=groups,
        local_ranks=environment.local_world_size,
        progress=progress,
        watchdog=_watchdog(config, world, groups, progress, device),
        device=device,
        hardware=hardware,
        plan=plan,
        schedules=schedules,
        splits=splits,
        corpus=demo,
        state=state,
        meter=meter,
        start=start,
        rollback=None if start is None else rollback_of(config.checkpoint, environment),
        compiled=compiled,
        choices=(*choices, *splits.choices),
        say=say,
    )


def _say_environment(config: RunConfig, environment: Environment, device: torch.device, say: Say) -> None:
    """What of the user's variables harms this run."""
    if environment.world_size > 1 and device.type == "cuda":
        for complaint in complaints(config, environment.communication()):
            say(complaint)
    if environment.world_size == 1 and config.runtime.flight_recorder_dump_path is not None:
        say("--flight-recorder-dump-path: one process sends nothing, so there is nothing to record.")


def _say_no_table(config: RunConfig, plan: Plan, state: TrainState, say: Say) -> None:
    """A step of --fp8-stats-interval that will not come."""
    every, last = config.precision.fp8_stats_interval, plan.batch.total_iterations
    if every is not None and (first := (state.iteration // every + 1) * every) > last > state.iteration:
        say(f"--fp8-stats-interval {every}: its next table is of step {first}, and the run ends with {last}.")


def _check_graphs(config: RunConfig, plan: Plan) -> None:
    if config.compile.cuda_graph_impl != "none" and plan.grid.dp > 1:
        raise ConfigError(
            f"--cuda-graph-impl local does not go with {plan.grid.dp} data-parallel processes.",
            why="gradients travel while the last backward computes, and a recording does not send them.",
            mend="leave it out, or run one process.",
        )


def _check_profile(config: RunConfig, plan: Plan, world_size: int) -> None:
    """Steps and ranks of --profile that this run does not have."""
    options, total = config.logging, plan.batch.total_iterations
    if not options.profile:
        return
    if options.profile_step_start >= total:  # of --train-samples: a rule knows --train-iters
        raise ConfigError(
            f"--profile-step-start {options.profile_step_start} lies behind the last step, {total}.",
            why="only the steps after it are profiled.",
            mend=f"use a number below {total}, or leave --profile out.",
        )
    if absent := [rank for rank in options.profile_ranks if rank >= world_size]:
        raise ConfigError(
            f"--profile-ranks {' '.join(map(str, options.profile_ranks))}: there is no rank {absent[0]}.",
            why=f"ranks count from 0, and the run has {world_size}.",
            mend="name ranks of the run, or leave it out: the first is profiled.",
        )


def _say_idle(config: RunConfig, plan: Plan, say: Say) -> None:
    """Options of what data-parallel ranks send, where there is one."""
    if plan.grid.dp > 1:
        return
    known = options_by_field()
    idle = [
        known[name].flag for name in SENDING if value_of(config, name) not in (known[name].default, False)
    ]
    if idle:
        say(f"{', '.join(idle)}: one data-parallel process sends no gradients, so there is nothing to do.")


def _watchdog(
    config: RunConfig, world: World, groups: Groups, progress: Progress, device: torch.device
) -> Watchdog:
    prefix, backend = config.runtime.flight_recorder_dump_path, config.parallel.distributed_backend
    backend_of_run = choose_backend(backend, device).ran

    def record() -> None:
        if prefix is not None:
            write_flight_record(prefix, groups.rank, backend_of_run)

    return Watchdog(
        world.store,
        groups.rank,
        groups.world.size,
        progress,
        steady_s=config.parallel.hang_timeout_seconds,
        patient_s=60 * config.parallel.startup_timeout_minutes,
        record=record,
    )


def _open_groups(config: RunConfig, world: World, plan: Plan, progress: Progress) -> Groups:
    """The groups of the plan's grid."""
    if world.control.handle is None:
        return Groups()
    grid = plan.grid
    return open_groups(
        grid.groups("tp"),
        grid.groups("dp"),
        world.control,
        instances=plan.data_parallel.instances,
        progress=progress,
        timeout_s=collective_timeout_s(config.parallel),
    )


def _compiled(
    config: RunConfig, state: TrainState, device: torch.device, environment: Environment, say: Say
) -> tuple[CompileLog | None, tuple[Choice, ...]]:
    """Have the model's blocks compiled, if that was asked for."""
    if not config.compile.use_torch_compile:
        return None, ()
    log, choice = compile_blocks(state.model.layers, device.type, say, environment=environment)
    return log, (choice,)


def _introduce(plan: Plan, choices: Sequence[Choice], splits: DataSplits, say: Say) -> None:
    """What is about to run, and on which data: the answer to "is this what I meant?"."""
    said = [choice for choice in choices if choice.what == BESIDE_FP8]
    say("; ".join(f"{choice.what}: {choice.ran}" for choice in choices if choice not in said))
    for choice in said:
        say(f"{choice.what}: {choice.why}.")
    count, memory = format_count(plan.parameters.total), format_bytes(plan.memory.reserved)
    say(f"model: {count} parameters, {memory} of memory predicted")
    for part in splits.parts[:MOST_PARTS]:
        share = f", {part.weight:.1%} of the samples" if part.weight < 1 else ""
        say(
            f"{part.split} data: {part.name}: {format_count(part.num_tokens)} tokens in "
            f"{format_count(part.num_documents)} documents, seen {part.epochs:.3g} times{share}"
        )
    if len(splits.parts) > MOST_PARTS:
        say(f"and {len(splits.parts) - MOST_PARTS} more, all of them in the summary.")
    for choice in splits.choices:
        say(f"{choice.what}: {choice.ran}: {choice.why}.")


def _silent(text: str) -> None:
    """What a rank but the first says."""


def _say_start(config: RunConfig, start: Start, state: TrainState, lines: list[str], say: Say) -> None:
    if start.weights_only:
        say(f"weights loaded from {start.folder}; training starts at step 0.")
        return
    say(f"resumed from {start.folder}: step {state.iteration}, {state.consumed_samples} samples consumed.")
    for line in (*fp8_changes(state, start), *lines, *changed_options(config, start)):
        say(line)
