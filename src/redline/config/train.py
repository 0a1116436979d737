"""[train]: batches, length of the run, evaluation, and what ends it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import BATCH_SIZES, CHECKS, REPLICAS

TOKEN_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Section):
    """The loop around the optimizer step."""

    title: ClassVar[str] = "Training"

    seq_length: int = flag(
        1024, short=True, at_least=1, other=512, megatron="required", help="Tokens of a sample."
    )
    micro_batch_size: int = flag(
        1,
        short=True,
        at_least=1,
        account="memory",
        megatron="required",
        help="Samples of one forward and backward pass.",
    )
    global_batch_size: int | None = flag(
        None,
        short=True,
        at_least=1,
        other=4,
        excludes="batch",
        help="Samples of an optimizer step; unset: one microbatch.",
    )
    rampup_batch_size: tuple[int, int, int] | None = flag(
        None,
        metavar="N",
        at_least=1,
        other=(1, 1, 100),
        needs={"global_batch_size": SET},
        help="START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over the first SAMPLES.",
    )
    step_batch_size_schedule: str | None = flag(
        None,
        excludes="batch",
        other="0:1 10K:2",
        help='Global batch by tokens seen, for example "0:768 250B:1536".',
    )
    decrease_batch_size_if_needed: bool = flag(
        False, waits_for=BATCH_SIZES, help="Round the global batch down to what the ranks divide."
    )
    train_iters: int | None = flag(
        None, short=True, at_least=1, other=10, excludes="length", help="Optimizer steps to train."
    )
    train_samples: int | None = flag(
        None, short=True, at_least=1, other=10, excludes="length", help="Samples to train on."
    )
    z_loss: float = flag(
        0.0,
        at_least=0,
        other=0.1,
        own=True,
        help="Weight of the squared log-partition in the training loss; evaluation is without.",
    )
    seed: int = flag(
        1234,
        short=True,
        at_least=0,
        at_most=2**32 - 1,
        help="Seed of initial weights, dropout and data order.",
    )
    data_parallel_random_init: bool = flag(
        False, waits_for=REPLICAS, help="Different initial weights on every data-parallel rank."
    )
    use_cpu_initialization: bool | None = flag(
        None,
        built_in="initial weights are functions of the seed and the parameter's name, on any device.",
        help="Initialize on the CPU.",
    )
    use_mcore_models: bool | None = flag(
        None,
        built_in="there is one implementation of the model.",
        help="Megatron's switch to its newer models.",
    )
    calculate_per_token_loss: bool | None = flag(
        None,
        megatron=False,
        built_in="the loss is the token mean over the whole global batch.",
        help="Average the loss over tokens.",
    )
    eval_iters: int = flag(
        100, short=True, at_least=0, help="Global batches of an evaluation; 0 evaluates never."
    )
    eval_interval: int | None = flag(
        None,
        short=True,
        at_least=1,
        other=2,
        needs={"eval_iters": SET},
        help="Steps between evaluations; unset: at the end.",
    )
    exit_interval: int | None = flag(
        None, at_least=1, other=3, help="Save and exit once the step is a multiple of this."
    )
    exit_duration_in_mins: float | None = flag(
        None, more_than=0, other=60.0, metavar="MINUTES", help="Save and exit after this time."
    )
    exit_signal_handler: bool = flag(
        True, megatron=False, help="On SIGTERM or SIGINT finish the step, save and exit."
    )
    deterministic_mode: bool = flag(
        False, account="kernels", help="Only operators that give the same bits every time."
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True, help="Look for NaN and Inf in the loss and the gradients."
    )
    nonfinite_action: Literal["stop", "skip"] = flag(
        "stop",
        own=True,
        needs={"check_for_nan_in_loss_and_grad": True},
        help="After a NaN or Inf: stop with an error, or skip the step and count it.",
    )
    check_for_spiky_loss: bool = flag(False, waits_for=CHECKS, help="Look for sudden rises of the loss.")
    check_for_large_grads: bool = flag(False, waits_for=CHECKS, help="Look for unusually large gradients.")
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = flag(
        "disabled",
        megatron="validate_results",
        waits_for=CHECKS,
        help="Rerun suspicious steps to find faulty hardware.",
    )
    manual_gc: bool = flag(False, account="host", help="Collect Python's garbage at chosen steps alone.")
    manual_gc_interval: int = flag(
        0,
        at_least=0,
        other=50,
        account="host",
        needs={"manual_gc": True},
        help="Steps between those collections; 0: none.",
    )
    empty_unused_memory_level: Literal[0, 1, 2] = flag(
        0, account="memory", help="Return cached device memory: 1 after the passes, 2 also after the step."
    )


def batch_schedule(text: str) -> tuple[tuple[int, int], ...] | None:
    """(tokens seen, global batch from there on) of each step of --step-batch-size-schedule.

    "0:768 250B:1536" -> ((0, 768), (250_000_000_000, 1536)). None when `text` does not start at 0 tokens,
    its thresholds do not rise, or a word is not TOKENS:SIZE.
    """
    steps = []
    for word in text.replace(",", " ").split():
        tokens, _, size = word.partition(":")
        unit = tokens[-1:].upper() if tokens[-1:].isalpha() else ""
        number = tokens.removesuffix(tokens[-1:]) if unit else tokens
        if unit not in TOKEN_UNITS or not size.isdecimal() or not number.replace(".", "", 1).isdecimal():
            return None
        steps.append((round(float(number) * TOKEN_UNITS[unit]), int(size)))
    thresholds = [tokens for tokens, _ in steps]
    rising = thresholds == sorted(set(thresholds)) and thresholds[:1] == [0]
    return tuple(steps) if rising and all(size for _, size in steps) else None
