"""[logging]: what a run prints and records."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import LOGGING, STRAGGLER_CONTROL, TIMERS

PROFILE = {"profile": True}
WANDB = {"wandb_project": SET}
STRAGGLER = {"log_straggler": True}
EVERY_NUMBER = "TensorBoard gets every number of metrics.jsonl."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig(Section):
    """Lines, metrics and traces. metrics.jsonl holds every step whatever is chosen here."""

    title: ClassVar[str] = "Logging and profiling"
    account: ClassVar[str] = "host"

    log_interval: int = flag(10, short=True, at_least=1, megatron=100, help="Steps between printed lines.")
    tensorboard_dir: str | None = flag(
        None, metavar="DIR", help="Folder of TensorBoard events; unset: in the run's folder."
    )
    tensorboard_log_interval: int = flag(1, at_least=1, help="Steps between TensorBoard points.")
    log_throughput: bool = flag(False, help="Print TFLOP/s as well as tokens/s.")
    throughput_drop: float = flag(
        0.2,
        more_than=0,
        less_than=1,
        own=True,
        needs={"log_throughput": True},
        help="Share below the run's median from which an interval is reported with its cause.",
    )
    log_params_norm: bool = flag(False, help="Record the norm of the parameters.")
    log_num_zeros_in_grad: bool = flag(False, help="Record how many gradient elements are zero.")
    log_memory_to_tensorboard: bool | None = flag(
        None, megatron=False, built_in=EVERY_NUMBER, help="Record memory in TensorBoard."
    )
    log_validation_ppl_to_tensorboard: bool | None = flag(
        None, megatron=False, built_in=EVERY_NUMBER, help="Record validation perplexity in TensorBoard."
    )
    log_progress: bool = flag(False, help="Append tokens and FLOPs of each checkpoint to progress.txt.")
    log_timers_to_tensorboard: bool = flag(False, waits_for=TIMERS, help="Record timers in TensorBoard.")
    timing_log_level: Literal[0, 1, 2] = flag(0, waits_for=TIMERS, help="How finely a step is timed.")
    timing_log_option: Literal["minmax", "max", "all"] = flag(
        "minmax",
        waits_for=TIMERS,
        needs={"timing_log_level": SET},
        help="What is printed of all ranks' times.",
    )
    log_max_attention_logit: bool = flag(False, waits_for=LOGGING, help="Record the largest attention score.")
    log_energy: bool = flag(False, waits_for=LOGGING, help="Record the energy used.")
    log_straggler: bool = flag(
        False, help="Compare the ranks' own times of a step at each --log-interval and name the slowest."
    )
    straggler_minmax_count: int = flag(
        1, at_least=1, needs=STRAGGLER, help="How many of the slowest and fastest ranks are named."
    )
    straggler_ctrlr_port: int | None = flag(
        None, waits_for=STRAGGLER_CONTROL, needs=STRAGGLER, help="Port that switches the comparison."
    )
    straggler_on_startup: bool | None = flag(
        None,
        megatron=True,
        built_in="ranks are compared from the start to the end of a run.",
        help="Begin with the comparison switched on.",
    )
    wandb_project: str | None = flag(None, help="Project of Weights & Biases that gets every number too.")
    wandb_exp_name: str | None = flag(None, needs=WANDB, help="Name of the run there; unset: its folder's.")
    wandb_save_dir: str | None = flag(
        None, metavar="DIR", needs=WANDB, help="Its local folder; unset: in the run's folder."
    )
    wandb_entity: str | None = flag(None, needs=WANDB, help="Its owner.")
    prometheus_port: int | None = flag(
        None,
        at_least=1,
        at_most=65535,
        other=9400,
        own=True,
        help="Port that serves the newest numbers to Prometheus.",
    )
    prometheus_address: str = flag(
        "127.0.0.1",
        own=True,
        metavar="HOST",
        needs={"prometheus_port": SET},
        help="Address it listens on; 0.0.0.0: reachable from other machines.",
    )
    profile_ledger: bool = flag(
        True, own=True, help="Profile two steps after the warm-up, for the account of where their time went."
    )
    ledger_interval: int | None = flag(
        None,
        at_least=1,
        own=True,
        needs={"profile_ledger": True},
        help="Steps between further such accounts; unset: one a run.",
    )
    profile: bool = flag(False, help="Profile some steps, for Nsight Systems if not said otherwise.")
    profile_step_start: int = flag(10, at_least=0, needs=PROFILE, help="Steps before the first profiled one.")
    profile_step_end: int = flag(12, at_least=1, needs=PROFILE, help="Last profiled step.")
    profile_ranks: tuple[int, ...] = flag(
        (), at_least=0, needs=PROFILE, help="Ranks to profile; unset: the first."
    )
    use_pytorch_profiler: bool = flag(
        False, needs=PROFILE, help="Profile with torch.profiler: a trace in the run's folder."
    )
    nvtx_ranges: bool = flag(False, needs=PROFILE, help="Mark operators and regions for Nsight Systems.")
    record_memory_history: bool = flag(False, account="memory", help="Record every allocation on the GPU.")
    memory_snapshot_path: str = flag(
        "snapshot.pickle",
        account="memory",
        metavar="FILE",
        needs={"record_memory_history": True},
        help="Where that record goes.",
    )
