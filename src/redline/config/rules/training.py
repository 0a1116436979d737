"""Rules of batches, schedules, loss scaling, profiled steps and checkpoints."""

from redline.config.data import packs
from redline.config.rules.rule import Broken, rule, rules_of
from redline.config.train import batch_schedule
from redline.config.tree import RunConfig


@rule("length-stated", "train_iters", "train_samples", why="a run has an end.", training=True)
def length_stated(config: RunConfig) -> Broken:
    if config.train.train_iters is not None or config.train.train_samples is not None:
        return None
    return "neither --train-iters nor --train-samples is given.", "state one, for example --train-iters 1000."


@rule(
    "batch-of-microbatches",
    "global_batch_size",
    "micro_batch_size",
    why="an optimizer step is a whole number of microbatches.",
)
def batch_of_microbatches(config: RunConfig) -> Broken:
    micro, whole = config.train.micro_batch_size, config.train.global_batch_size
    if whole is None or whole % micro == 0:
        return None
    what = f"--global-batch-size {whole} is no multiple of --micro-batch-size {micro}."
    return (
        what,
        f"use --global-batch-size {max(whole // micro, 1) * micro} or {(whole // micro + 1) * micro}.",
    )


@rule(
    "packing-resets",
    "reset_position_ids",
    "reset_attention_mask",
    "packing",
    "dataloader_inter_document_masking",
    why="packed documents restart positions and keep attention to themselves by their own borders.",
)
def packing_resets(config: RunConfig) -> Broken:
    data = config.data
    if not (packs(data) and (data.reset_position_ids or data.reset_attention_mask)):
        return None
    asked = "--reset-position-ids" if data.reset_position_ids else "--reset-attention-mask"
    kind = "--packing" if data.packing else "--dataloader-inter-document-masking"
    return f"{asked} has no meaning beside {kind}.", f"leave {asked} out."


@rule(
    "rampup-steps",
    "rampup_batch_size",
    "global_batch_size",
    "micro_batch_size",
    why="the batch grows from START by INCREMENT to the global batch, always in whole microbatches.",
)
def rampup_steps(config: RunConfig) -> Broken:
    t = config.train
    if t.rampup_batch_size is None or t.global_batch_size is None:
        return None
    start, increment, samples = t.rampup_batch_size
    typed = f"--rampup-batch-size {start} {increment} {samples}"
    if start > t.global_batch_size:
        return f"{typed} starts above --global-batch-size {t.global_batch_size}.", "start lower."
    if (t.global_batch_size - start) % increment:
        what = f"{typed} does not reach --global-batch-size {t.global_batch_size} in equal increments."
        return what, f"choose an increment that divides {t.global_batch_size - start}."
    if start % t.micro_batch_size or increment % t.micro_batch_size:
        return (
            f"{typed} is not in multiples of --micro-batch-size {t.micro_batch_size}.",
            "use multiples of it.",
        )
    return None


@rule(
    "batch-schedule",
    "step_batch_size_schedule",
    "micro_batch_size",
    why="the schedule is a list of TOKENS:SIZE that starts at 0 tokens and rises, in whole microbatches.",
)
def batch_schedule_reads(config: RunConfig) -> Broken:
    text, micro = config.train.step_batch_size_schedule, config.train.micro_batch_size
    if text is None:
        return None
    steps = batch_schedule(text)
    if steps is None:
        return f'--step-batch-size-schedule "{text}" is no schedule.', 'write for example "0:768 250B:1536".'
    if odd := [size for _, size in steps if size % micro]:
        what = f'--step-batch-size-schedule "{text}": {odd[0]} is no multiple of --micro-batch-size {micro}.'
        return what, f"use multiples of {micro}."
    return None


@rule(
    "schedule-units",
    "train_iters",
    "train_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    why="schedules count in the unit of the run's length.",
)
def schedule_units(config: RunConfig) -> Broken:
    o = config.optim
    run, unit, other = "iters", "samples", "--train-iters"
    if config.train.train_samples is not None:
        run, unit, other = "samples", "iters", "--train-samples"
    elif config.train.train_iters is None:
        return None
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if value := getattr(o, f"{name}_{unit}"):
            typed = f"--{name.replace('_', '-')}-{unit} {value}"
            return f"{typed} does not go with {other}.", f"use --{name.replace('_', '-')}-{run}."
    return None


@rule(
    "warmup-before-decay",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "train_iters",
    "train_samples",
    why="the learning rate decays after it has warmed up.",
)
def warmup_before_decay(config: RunConfig) -> Broken:
    for unit in ("iters", "samples"):
        warmup = getattr(config.optim, f"lr_warmup_{unit}")
        decay = getattr(config.optim, f"lr_decay_{unit}") or getattr(config.train, f"train_{unit}")
        if decay and warmup >= decay:
            what = f"--lr-warmup-{unit} {warmup} does not end before the decay does, at {decay}."
            return what, f"use fewer than {decay}."
    return None


@rule(
    "warmup-exists",
    "lr_warmup_init",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    why="it is where the warm-up starts.",
)
def warmup_exists(config: RunConfig) -> Broken:
    o = config.optim
    if not o.lr_warmup_init or o.lr_warmup_iters or o.lr_warmup_samples or o.lr_warmup_fraction:
        return None
    return (
        f"--lr-warmup-init {o.lr_warmup_init} has no effect without a warm-up.",
        "give --lr-warmup-iters, or leave it out.",
    )


@rule(
    "rates-ordered",
    "lr",
    "min_lr",
    "lr_warmup_init",
    "decoupled_lr",
    "decoupled_min_lr",
    why="--lr is the peak of the schedule.",
)
def rates_ordered(config: RunConfig) -> Broken:
    o = config.optim
    for low, high in (("min_lr", "lr"), ("lr_warmup_init", "lr"), ("decoupled_min_lr", "decoupled_lr")):
        least, peak = getattr(o, low), getattr(o, high)
        if least is not None and peak is not None and least > peak:
            names = f"--{low.replace('_', '-')} {least}", f"--{high.replace('_', '-')} {peak}"
            return f"{names[0]} is above {names[1]}.", "lower the one or raise the other."
    return None


@rule(
    "wsd-length",
    "lr_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "train_iters",
    "train_samples",
    why="WSD holds the learning rate until its final decay begins.",
)
def wsd_length(config: RunConfig) -> Broken:
    o, t = config.optim, config.train
    if o.lr_decay_style != "WSD":
        return None
    if o.lr_wsd_decay_iters is None and o.lr_wsd_decay_samples is None:
        return (
            "--lr-decay-style WSD is given without the length of its final decay.",
            "give --lr-wsd-decay-iters.",
        )
    for unit in ("iters", "samples"):
        final = getattr(o, f"lr_wsd_decay_{unit}")
        whole = getattr(o, f"lr_decay_{unit}") or getattr(t, f"train_{unit}")
        if final and whole and final > whole:
            return (
                f"--lr-wsd-decay-{unit} {final} is longer than the schedule, {whole}.",
                f"use {whole} or fewer.",
            )
    return None


@rule(
    "weight-decay-ends",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    why="a weight decay that moves has a start and a higher end.",
)
def weight_decay_ends(config: RunConfig) -> Broken:
    o = config.optim
    if o.weight_decay_incr_style == "constant":
        return None
    start, end = o.start_weight_decay, o.end_weight_decay
    typed = f"--weight-decay-incr-style {o.weight_decay_incr_style}"
    if start is None or end is None:
        return f"{typed} is given without both ends.", "give --start-weight-decay and --end-weight-decay."
    if start > end:
        return f"{typed}: --start-weight-decay {start} is above --end-weight-decay {end}.", "exchange them."
    return None


@rule(
    "loss-scale-bounds",
    "initial_loss_scale",
    "min_loss_scale",
    why="the dynamic loss scale starts above its floor.",
)
def loss_scale_bounds(config: RunConfig) -> Broken:
    least, start = config.optim.min_loss_scale, config.optim.initial_loss_scale
    if least <= start:
        return None
    return (
        f"--min-loss-scale {least} is above --initial-loss-scale {start}.",
        "lower the floor or raise the start.",
    )


@rule(
    "gradient-dtype",
    "grad_reduce_in_bf16",
    "accumulate_allreduce_grads_in_fp32",
    why="gradients are accumulated either in bf16 or in fp32.",
)
def gradient_dtype(config: RunConfig) -> Broken:
    p = config.precision
    if not (p.grad_reduce_in_bf16 and p.accumulate_allreduce_grads_in_fp32):
        return None
    return "--grad-reduce-in-bf16 contradicts --accumulate-allreduce-grads-in-fp32.", "keep one of them."


@rule(
    "bf16-gradients-beside-bf16",
    "main_grads_dtype",
    "fp16",
    "fp32",
    "fp64",
    why="bf16 main gradients have the dtype of bf16 parameters.",
)
def bf16_gradients_beside_bf16(config: RunConfig) -> Broken:
    p = config.precision
    other = next((name for name in ("fp16", "fp32", "fp64") if getattr(p, name)), None)
    if config.optim.main_grads_dtype != "bf16" or other is None:
        return None
    return f"--main-grads-dtype bf16 does not go with --{other}.", "use --bf16, or leave it out."


@rule(
    "moments-in-8-bits",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp64",
    why="codes of 8 bits are cut from fp32 numbers.",
)
def moments_in_8_bits(config: RunConfig) -> Broken:
    o = config.optim
    coded = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(o, name) == "fp8"]
    if not config.precision.fp64 or not coded:
        return None
    return f"--{coded[0].replace('_', '-')} fp8 does not go with --fp64.", "leave one of them out."


@rule(
    "offload-something",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    why="the fraction is the share of the optimizer states that host memory keeps.",
)
def offload_something(config: RunConfig) -> Broken:
    o = config.optim
    if not o.optimizer_cpu_offload or o.optimizer_offload_fraction:
        return None
    return "--optimizer-cpu-offload moves nothing at a fraction of 0.", "give another, or leave both out."


@rule(
    "profile-window",
    "profile",
    "profile_step_start",
    "profile_step_end",
    "train_iters",
    why="steps after --profile-step-start up to --profile-step-end are profiled, as Megatron counts them.",
    training=True,
)
def profile_window(config: RunConfig) -> Broken:
    options, last = config.logging, config.train.train_iters
    if not options.profile:
        return None
    start, end = options.profile_step_start, options.profile_step_end
    if end <= start:
        what = f"--profile-step-start {start} and --profile-step-end {end} leave no step to profile."
        return what, f"use --profile-step-end {start + 1} or more."
    if last is not None and last <= start:
        what = f"--profile watches the steps after {start}, up to {end}, and the run ends with step {last}."
        return what, f"use a --profile-step-start below {last}, or leave --profile out."
    return None


@rule(
    "source-of-weights",
    "finetune",
    "load",
    "pretrained_checkpoint",
    why="it loads the weights of an earlier run.",
)
def source_of_weights(config: RunConfig) -> Broken:
    c = config.checkpoint
    if not c.finetune or c.load or c.pretrained_checkpoint:
        return None
    return "--finetune has no effect without a checkpoint.", "give --load DIR or --pretrained-checkpoint DIR."


RULES = rules_of(globals())
