"""[checkpoint]: saving, loading and resuming."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import CHECKPOINT_FORMATS, LOCAL_CHECKPOINTS

LOADING = {"load": SET}
NO_GENERATOR = "random numbers are functions of the seed and the step; no generator state is stored or read."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Section):
    """What is written, when, and what a run starts from."""

    title: ClassVar[str] = "Checkpoints"
    account: ClassVar[str] = "host"

    save: str | None = flag(
        None, short=True, metavar="DIR", help="The run's folder; unset: runs/<name>-<time>."
    )
    load: str | None = flag(
        None, short=True, metavar="DIR", help="Resume from the latest checkpoint of this run's folder."
    )
    save_interval: int | None = flag(
        None,
        short=True,
        at_least=1,
        other=2,
        aliases=("--persistent-save-interval",),
        help="Steps between checkpoints; unset: at the end alone.",
    )
    keep_checkpoints: int = flag(2, at_least=1, own=True, help="Newest checkpoints to keep.")
    async_save: bool = flag(True, megatron=False, help="Write checkpoints while training goes on.")
    ckpt_step: int | None = flag(
        None, at_least=0, other=1, needs=LOADING, help="Step to load, in place of the latest."
    )
    save_optim: bool = flag(True, help="Store optimizer states.")
    load_optim: bool = flag(True, needs=LOADING, help="Load optimizer states.")
    save_rng: bool | None = flag(
        None, megatron=True, built_in=NO_GENERATOR, already=(False, True), help="Store generator states."
    )
    load_rng: bool | None = flag(
        None, megatron=True, built_in=NO_GENERATOR, already=(False, True), help="Load generator states."
    )
    finetune: bool = flag(False, help="Load the weights alone and start from step 0.")
    pretrained_checkpoint: str | None = flag(
        None, metavar="DIR", help="Weights to start from where --load has no checkpoint yet."
    )
    use_checkpoint_args: bool = flag(False, needs=LOADING, help="Take the model's shape from the checkpoint.")
    exit_on_missing_checkpoint: bool = flag(False, needs=LOADING, help="Stop when --load has no checkpoint.")
    ckpt_format: Literal["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"] = flag(
        "torch_dist",
        refused=dict.fromkeys(("torch", "torch_dcp", "fsdp_dtensor"), CHECKPOINT_FORMATS),
        help="Format of checkpoints.",
    )
    auto_detect_ckpt_format: bool = flag(
        False, waits_for=CHECKPOINT_FORMATS, help="Find out the format on loading."
    )
    ckpt_convert_format: Literal["torch", "torch_dist"] | None = flag(
        None, waits_for=CHECKPOINT_FORMATS, help="Convert checkpoints to this format and exit."
    )
    non_persistent_save_interval: int | None = flag(
        None,
        at_least=1,
        waits_for=LOCAL_CHECKPOINTS,
        help="Steps between checkpoints that only the newest outlives.",
    )
    non_persistent_ckpt_type: Literal["global", "local"] | None = flag(
        None, waits_for=LOCAL_CHECKPOINTS, help="Where those go: with the others, or on each node."
    )
    ckpt_fully_parallel_save: bool | None = flag(
        None, megatron=True, built_in="every rank writes a part.", help="All ranks write a part."
    )
    ckpt_fully_parallel_load: bool | None = flag(
        None,
        megatron=False,
        built_in="every rank reads just what it holds.",
        help="All ranks read a part.",
    )
    dist_ckpt_strictness: Literal[
        "raise_all",
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = flag(
        "raise_all",
        megatron="assume_ok_unexpected",
        waits_for=CHECKPOINT_FORMATS,
        metavar="LEVEL",
        help="What happens to missing and unexpected tensors.",
    )
    dist_ckpt_optim_fully_reshardable: bool | None = flag(
        None,
        megatron=False,
        built_in="every checkpoint loads under any layout.",
        help="Optimizer states for any layout.",
    )
