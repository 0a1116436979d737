"""What a run starts from: nothing, another run's weights, or the whole state of an earlier part of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from redline.checkpoint import compare_values, find_iteration, find_latest, load_checkpoint, read_values
from redline.config import CheckpointConfig, RunConfig, from_dict, to_dict, value_of, with_values
from redline.config.model import SHAPE_FIELDS
from redline.data import Source
from redline.errors import CheckpointError
from redline.formulas.shape import ModelShape
from redline.plan import (
    START,
    BatchSchedule,
    LrSchedule,
    Plan,
    Reached,
    ScheduleSpec,
    Segment,
    WeightDecaySchedule,
)
from redline.run.batches import is_other_data
from redline.run.folder import checkpoint_root, goes_on
from redline.step import TrainState, returned_in

MOMENTS = ("exp_avg/*", "exp_avg_sq/*")
LATER_FIELDS = {
    "window": None,
    "softcap": 0.0,
    "softmax_type": "vanilla",
    "activation_clamp": None,
    "glu_offset": 0.0,
}  # left out where unset: earlier checkpoints lack them
SCALES = ("fp8.*",)
# What may differ in the same model: padding (a checkpoint holds true sizes), dropout, how weights began.
FREE_FIELDS = ("padded_vocab_size", "hidden_dropout", "attention_dropout", "init_std", "embedding_init_std")
# What acts at step 0 alone, and what of the checkpoint goes on in its place.
INITIAL_FIELDS = {
    "model.init_method_std": "weights go on",
    "model.embedding_init_method_std": "weights go on",
    "optim.initial_loss_scale": "loss scale goes on",
}
SCHEDULED_FIELDS = (  # beside optim.lr*; --use-checkpoint-opt-param-scheduler takes the checkpoint's
    "optim.min_lr",
    "optim.decoupled_lr",
    "optim.decoupled_min_lr",
    "optim.weight_decay",
    "optim.start_weight_decay",
    "optim.end_weight_decay",
    "optim.weight_decay_incr_style",
)
# Sections whose values may change on resume without being worth a line.
QUIET_SECTIONS = ("checkpoint", "logging", "runtime")


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint a run begins with.

    Attributes:
        folder: of the checkpoint.
        weights_only: take the parameters and begin at step 0 (`--finetune`, `--pretrained-checkpoint`).
        values: what it holds beside tensors.
        notices: what to tell the user about how it was found.
    """

    folder: Path
    weights_only: bool
    values: Mapping[str, Any]
    notices: tuple[str, ...] = ()

    @property
    def reached(self) -> Reached:
        """Where the run goes on. Checkpoints of earlier releases do not say which batches it took."""
        if self.weights_only:
            return START
        counters = self.values["state"]  # one without them is refused once the rest has been loaded
        iteration, samples = (int(counters.get(name, 0)) for name in ("iteration", "consumed_samples"))
        segments = (Segment(*map(int, each)) for each in self.values.get("batches", ()))
        return Reached(iteration, samples, tuple(segments))


def find_start(options: CheckpointConfig) -> tuple[Start | None, tuple[str, ...]]:
    """The checkpoint that the options name, if there is one, and what to say about it.

    `--load` of a folder without a checkpoint starts afresh: one command both begins and resumes a run.

    Raises: CheckpointError when it must exist and does not, or is damaged.
    """
    if options.load is not None:
        root = Path(options.load)
        _require_folder(root, "--load", allowed_missing=goes_on(options))
        found, notices = _find(root, options.ckpt_step)
        if found is not None:
            return Start(found, options.finetune, read_values(found), notices), notices
        if options.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {root} holds no checkpoint.",
                why="--exit-on-missing-checkpoint forbids starting afresh.",
                mend="name a run folder with a checkpoint, or drop --exit-on-missing-checkpoint.",
            )
        if options.pretrained_checkpoint is None:
            return None, (*notices, f"--load {root} holds no checkpoint yet: starting at step 0.")
    if options.pretrained_checkpoint is not None:
        root = Path(options.pretrained_checkpoint)
        _require_folder(root, "--pretrained-checkpoint")
        found, notices = _find(root, None)
        if found is None:
            raise CheckpointError(
                f"--pretrained-checkpoint {root} holds no checkpoint.",
                mend="name a run folder that holds one.",
            )
        return Start(found, True, read_values(found), notices), notices
    return None, ()


def require_same_start(options: CheckpointConfig, start: Start | None) -> None:
    """To be called once the folder that a run goes on in is held: what it opened must be the newest still.

    Raises: CheckpointError where another run has saved there since; going on would undo its steps.
    """
    now, _ = find_start(options)
    before, after = (None if each is None else (each.folder, each.values) for each in (start, now))
    if before == after:
        return
    opened, found = (each.folder.name if each else "no checkpoint" for each in (start, now))
    again = "another " * (opened == found)
    raise CheckpointError(
        f"--load {options.load}: this run has opened {opened}, and now the folder leads to {again}{found}.",
        why="another run has saved there meanwhile, and its steps would be undone.",
        mend="start again, once that run is over: the same command goes on from the newest checkpoint.",
    )


def _require_folder(path: Path, flag: str, *, allowed_missing: bool = False) -> None:
    if not path.is_dir() and not (allowed_missing and not path.exists()):
        raise CheckpointError(
            f"{flag} {path} is not a folder.",
            why="checkpoints lie in the folder of the run that wrote them.",
            mend="name that folder."
            if flag == "--pretrained-checkpoint"
            else "name that folder; with the same folder for --save it may be missing at first.",
        )


def _find(path: Path, step: int | None) -> tuple[Path | None, tuple[str, ...]]:
    """The checkpoint of `step`, or the latest, below a run folder, a folder of checkpoints, or itself one."""
    if step is None and (path / "values.json").is_file():
        return path, ()
    root = checkpoint_root(path)
    if step is not None:
        return find_iteration(root, step), ()
    found = find_latest(root)
    return found.folder, found.notices


def with_checkpoint_shape(config: RunConfig, explicit: frozenset[str], start: Start) -> RunConfig:
    """`--use-checkpoint-args`: the model that the checkpoint's run was told to build, flags of now on top."""
    saved = from_dict(start.values["config"])
    return with_values(config, {name: value_of(saved, name) for name in SHAPE_FIELDS if name not in explicit})


def restore(
    state: TrainState,
    start: Start,
    *,
    load_optim: bool = True,
    shape_taken: bool = False,
    narrower_moments: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill `state` from the checkpoint: everything, or the weights alone.

    Args:
        shape_taken: the model's shape is the checkpoint's, but for what was stated (`--use-checkpoint-args`).
        narrower_moments: the run may keep its moments in a narrower dtype than the checkpoint has.
        group: the ranks that load together, on the CPU; None for a single process.

    Raises: CheckpointError when it is another model's, or lacks what is wanted; nothing has been loaded then.
    """
    _require_same_model(start, state.shape, shape_taken=shape_taken)
    moments = load_optim and not start.weights_only
    if moments:
        _require_moments(start)
    scales = not start.weights_only and scales_fit(state, start)
    leave = (*(() if moments else MOMENTS), *(() if scales else SCALES))
    tensors = state.tensors(moments=moments, fp8=scales)
    load_checkpoint(start.folder, tensors, leave=leave, allow_rounding=narrower_moments, group=group)
    state.take(tensors)
    if not start.weights_only:
        kept = state.optimizer.state_values()
        state.load_values(start.values["state"])
        if not load_optim:
            state.optimizer.load_state_values(kept)


def scales_fit(state: TrainState, start: Start) -> bool:
    """Whether the checkpoint's fp8 scales serve this run; else it measures anew, as a new run does."""
    return state.fp8 is not None and state.fp8.state.fits(start.values["state"].get("fp8"))


def fp8_changes(state: TrainState, start: Start) -> list[str]:
    """What to say of fp8 that does not go on as the checkpoint's run left it, once `state` is restored."""
    said = []
    if state.fp8 is not None and not scales_fit(state, start):
        said.append(
            "fp8 scales: measured anew; the checkpoint has none for these GEMMs, this format and margin, "
            "and this length of history."
        )
    again = [site for site in returned_in(start.values["state"]) if site not in state.returned]
    if again:
        said.append(f"fp8 again, in NVIDIA's modules, though they had returned to bf16: {', '.join(again)}.")
    return said


def _require_moments(start: Start) -> None:
    if not from_dict(start.values["config"]).checkpoint.save_optim:
        raise CheckpointError(
            f"{start.folder} holds no optimizer states.",
            why="the run that wrote it was given --no-save-optim.",
            mend="add --no-load-optim: the run goes on from its step, with moments that begin at zero.",
        )


def _require_same_model(start: Start, shape: ModelShape, *, shape_taken: bool) -> None:
    saved, wanted = dict(start.values["model"]), model_values(shape)
    differences = compare_values(saved, wanted)
    if differences:
        listed = "; ".join(map(str, differences[:6]))
        raise CheckpointError(
            f"{start.folder} is a checkpoint of another model.",
            why=f"{listed}{'; ...' if len(differences) > 6 else ''}.",
            mend="leave the model options that differ out: --use-checkpoint-args takes what is not stated."
            if shape_taken
            else "give the same model options, or take them from the checkpoint with --use-checkpoint-args.",
        )


def model_values(shape: ModelShape) -> dict[str, Any]:
    """What makes a model the same one, as JSON values. Only learned positions tie it to a sequence length."""
    values: dict[str, Any] = _as_json(asdict(shape))
    free = (*FREE_FIELDS, *(() if shape.position == "learned_absolute" else ("max_positions",)))
    return {
        name: value
        for name, value in values.items()
        if name not in free and not (name in LATER_FIELDS and value == LATER_FIELDS[name])
    }


def checkpoint_values(
    config: RunConfig,
    plan: Plan,
    schedules: ScheduleSpec,
    state: TrainState,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything a checkpoint holds beside tensors.

    Args:
        data: what `mark_data` says of the samples so far.
    """
    return {
        "data": data,
        "batches": [list(astuple(each)) for each in plan.batch.until(state.iteration)],
        "config": _as_json(to_dict(config)),
        "model": model_values(plan.shape),
        "schedules": schedules.as_dict(),
        "state": state.values(),
    }


def resumed_schedules(
    config: RunConfig, planned: ScheduleSpec, start: Start
) -> tuple[ScheduleSpec, list[str]]:
    """Which learning-rate and weight-decay schedule wins on resume, and what to say where the two differ.

    The options given now, since a flag must act; the checkpoint's with --use-checkpoint-opt-param-scheduler.
    """
    differences = compare_values(start.values["schedules"], planned.as_dict())
    if start.weights_only or not differences:
        return planned, []
    if config.optim.use_checkpoint_opt_param_scheduler:
        return _schedules_from(start.values["schedules"]), []
    if config.optim.override_opt_param_scheduler:
        return planned, []
    listed = "; ".join(map(str, differences[:4]))
    return planned, [
        f"schedule: the options given now win over the checkpoint's ({listed}); "
        "--use-checkpoint-opt-param-scheduler turns that round."
    ]


def other_batches(batch: BatchSchedule, state: TrainState) -> list[str]:
    """What to say where the steps before took other batches than those of now: how much is left."""
    size, before = batch.global_batch_size(state.consumed_samples), batch.until(state.iteration)
    known = bool(before) and before[-1].batch_size == size
    if not batch.new_from or known or state.iteration >= batch.total_iterations:
        return []
    return [
        f"resume: steps take {size} samples from here on, otherwise than before: the run ends with step "
        f"{batch.total_iterations} after {batch.total_samples} samples."
    ]


def other_data(source: Source, start: Start) -> list[str]:
    """What to say where the samples come in another order than in the checkpoint's run."""
    if start.weights_only or not is_other_data(source, start.values.get("data", {})):
        return []
    return [
        "resume: the samples come in another order than in the checkpoint's run, so some that it has seen "
        "may come again and others never. Other data, seeds, splits, sequence lengths and numbers of epochs "
        "have other orders."
    ]


def _schedules_from(values: Mapping[str, Any]) -> ScheduleSpec:
    decoupled = values["decoupled"]
    return ScheduleSpec(
        main=LrSchedule(**values["main"]),
        decay=WeightDecaySchedule(**values["decay"]),
        decoupled=None if decoupled is None else LrSchedule(**decoupled),
    )


def changed_options(config: RunConfig, start: Start) -> list[str]:
    """One line for each option that differs from the checkpoint's run, and which of the two runs.

    Options that an earlier release lacked had their defaults.
    """
    saved, now = (_as_json(to_dict(each)) for each in (from_dict(start.values["config"]), config))
    for section in QUIET_SECTIONS:
        saved.pop(section, None)
        now.pop(section, None)
    return [
        f"resume: {difference}; {_which_runs(difference.name, config, start)}."
        for difference in compare_values(saved, now)
        if not difference.name.startswith("optim.lr")
    ]


def _which_runs(name: str, config: RunConfig, start: Start) -> str:
    """Of an option's two values: almost always the one given now."""
    if name in SCHEDULED_FIELDS and config.optim.use_checkpoint_opt_param_scheduler:
        return "the checkpoint's schedule is used, as --use-checkpoint-opt-param-scheduler says"
    goes_on = INITIAL_FIELDS.get(name)
    if name == "optim.initial_loss_scale":
        if not config.precision.fp16 or config.optim.loss_scale is not None:
            return "it has no effect where the loss scale does not move"
        if not _scale_goes_on(config, start):
            goes_on = None
    return (
        "the value given now is used"
        if goes_on is None
        else f"it acts only at the start of a run: the checkpoint's {goes_on}"
    )


def _scale_goes_on(config: RunConfig, start: Start) -> bool:
    """Whether the loss scale is the one that the checkpoint's run had reached, as `restore` loads it."""
    optimizer = start.values.get("state", {}).get("optimizer", {})
    return config.checkpoint.load_optim and bool(optimizer.get("loss_scale"))


def _as_json(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    if isinstance(value, Mapping):
        return {key: _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value
