"""[logging]: what a run prints and records."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import LOGGING, PROFILING

PROFILE = {"profile": True}
WANDB = {"wandb_project": SET}
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
    log_params_norm: bool = flag(False, help="Record the norm of the parameters.")
    log_num_zeros_in_grad: bool = flag(False, help="Record how many gradient elements are zero.")
    log_memory_to_tensorboard: bool | None = flag(
        None, megatron=False, built_in=EVERY_NUMBER, help="Record memory in TensorBoard."
    )
    log_validation_ppl_to_tensorboard: bool | None = flag(
        None, megatron=False, built_in=EVERY_NUMBER, help="Record validation perplexity in TensorBoard."
    )
    log_progress: bool = flag(False, help="Append tokens and FLOPs of each checkpoint to progress.txt.")
    log_timers_to_tensorboard: bool = flag(False, waits_for=PROFILING, help="Record timers in TensorBoard.")
    timing_log_level: Literal[0, 1, 2] = flag(0, waits_for=PROFILING, help="How finely a step is timed.")
    timing_log_option: Literal["minmax", "max", "all"] = flag(
        "minmax",
        waits_for=PROFILING,
        needs={"timing_log_level": SET},
        help="What is printed of all ranks' times.",
    )
    log_max_attention_logit: bool = flag(False, waits_for=LOGGING, help="Record the largest attention score.")
    log_energy: bool = flag(False, waits_for=LOGGING, help="Record the energy used.")
    log_straggler: bool = flag(False, waits_for=LOGGING, help="Look for slow ranks.")
    wandb_project: str | None = flag(None, waits_for=LOGGING, help="Project of Weights & Biases.")
    wandb_exp_name: str | None = flag(None, waits_for=LOGGING, needs=WANDB, help="Name of the run there.")
    wandb_save_dir: str | None = flag(
        None, metavar="DIR", waits_for=LOGGING, needs=WANDB, help="Its local folder."
    )
    wandb_entity: str | None = flag(None, waits_for=LOGGING, needs=WANDB, help="Its owner.")
    profile: bool = flag(False, waits_for=PROFILING, help="Profile some steps.")
    profile_step_start: int = flag(
        10, at_least=0, waits_for=PROFILING, needs=PROFILE, help="First profiled step."
    )
    profile_step_end: int = flag(
        12, at_least=1, waits_for=PROFILING, needs=PROFILE, help="Step at which profiling ends."
    )
    profile_ranks: tuple[int, ...] = flag(
        (), at_least=0, waits_for=PROFILING, needs=PROFILE, help="Ranks to profile."
    )
    use_pytorch_profiler: bool = flag(
        False, waits_for=PROFILING, needs=PROFILE, help="Profile with torch.profiler."
    )
    nvtx_ranges: bool = flag(False, waits_for=PROFILING, needs=PROFILE, help="Mark regions for Nsight.")
    record_memory_history: bool = flag(
        False, account="memory", waits_for=PROFILING, help="Record every allocation."
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle",
        account="memory",
        metavar="FILE",
        waits_for=PROFILING,
        needs={"record_memory_history": True},
        help="Where that record goes.",
    )
