"""[optim]: AdamW, its schedules, clipping and loss scaling."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import HALF_MAIN, HALF_MOMENTS, NUMERICS, OPTIMIZERS

WSD = {"lr_decay_style": "WSD"}
DECAYING = {"lr_decay_style": ("linear", "cosine", "inverse-square-root", "WSD")}
VARYING_DECAY = {"weight_decay_incr_style": ("linear", "cosine")}
AWARE = {"use_precision_aware_optimizer": True}
OFFLOADED = {"optimizer_cpu_offload": True}
OTHER_OPTIMIZERS = ("sgd", "muon", "dist_muon")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer step."""

    title: ClassVar[str] = "Optimizer and schedules"
    account: ClassVar[str] = "kernels"

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag(
        "adam", refused=dict.fromkeys(OTHER_OPTIMIZERS, OPTIMIZERS), help="The optimizer; adam is AdamW."
    )
    lr: float = flag(
        3e-4, short=True, at_least=0, other=1e-3, megatron="required", help="Peak learning rate."
    )
    min_lr: float = flag(
        0.0, short=True, at_least=0, other=1e-5, needs=DECAYING, help="Learning rate at the end of the decay."
    )
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = flag(
        "linear", short=True, help="How the learning rate falls after the warm-up."
    )
    lr_decay_iters: int | None = flag(
        None,
        at_least=1,
        other=20,
        needs=DECAYING,
        excludes="lr-decay",
        help="Steps until the decay ends; unset: all.",
    )
    lr_decay_samples: int | None = flag(
        None, at_least=1, other=20, needs=DECAYING, excludes="lr-decay", help="The same in samples."
    )
    lr_warmup_iters: int = flag(
        0, short=True, at_least=0, other=2, excludes="lr-warmup", help="Steps of warm-up."
    )
    lr_warmup_samples: int = flag(0, at_least=0, other=2, excludes="lr-warmup", help="Samples of warm-up.")
    lr_warmup_fraction: float | None = flag(
        None,
        at_least=0,
        at_most=1,
        other=0.1,
        excludes="lr-warmup",
        help="Warm-up as a share of the decay's length.",
    )
    lr_warmup_init: float = flag(
        0.0, at_least=0, other=1e-6, help="Learning rate at the start of the warm-up."
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", needs=WSD, help="Shape of WSD's final decay."
    )
    lr_wsd_decay_iters: int | None = flag(
        None, at_least=1, other=5, needs=WSD, excludes="wsd-decay", help="Steps of WSD's final decay."
    )
    lr_wsd_decay_samples: int | None = flag(
        None, at_least=1, other=5, needs=WSD, excludes="wsd-decay", help="The same in samples."
    )
    decoupled_lr: float | None = flag(
        None, at_least=0, other=1e-4, help="Learning rate of the embedding and the output head."
    )
    decoupled_min_lr: float | None = flag(
        None, at_least=0, other=1e-6, needs={"decoupled_lr": SET}, help="The same at the end of the decay."
    )
    weight_decay: float = flag(
        0.01, short=True, at_least=0, help="Decoupled decay of matrices; none on biases and norms."
    )
    start_weight_decay: float | None = flag(
        None, at_least=0, other=0.0, needs=VARYING_DECAY, help="Weight decay at the start."
    )
    end_weight_decay: float | None = flag(
        None, at_least=0, other=0.5, needs=VARYING_DECAY, help="Weight decay at the end."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", help="How weight decay moves from its start to its end."
    )
    apply_wd_to_qk_layernorm: bool = flag(
        False,
        waits_for=NUMERICS,
        needs={"qk_layernorm": True},
        help="Weight decay on the query and key norms too.",
    )
    clip_grad: float = flag(
        1.0, short=True, at_least=0, help="Largest global gradient norm; 0 does not clip."
    )
    adam_beta1: float = flag(0.9, at_least=0, less_than=1, help="Decay of the first moment.")
    adam_beta2: float = flag(0.999, short=True, at_least=0, less_than=1, help="Decay of the second moment.")
    adam_eps: float = flag(1e-8, more_than=0, other=1e-6, help="Added to the root of the second moment.")
    sgd_momentum: float = flag(
        0.9,
        at_least=0,
        less_than=1,
        needs={"optimizer": "sgd"},
        waits_for=OPTIMIZERS,
        help="Momentum of sgd.",
    )
    loss_scale: float | None = flag(
        None,
        more_than=0,
        other=1024.0,
        needs={"fp16": True},
        help="A fixed loss scale for fp16; unset: dynamic.",
    )
    initial_loss_scale: float = flag(
        2.0**32,
        more_than=0,
        other=65536.0,
        needs={"fp16": True, "loss_scale": None},
        help="Dynamic loss scale at the start.",
    )
    min_loss_scale: float = flag(
        1.0,
        more_than=0,
        other=2.0,
        needs={"fp16": True, "loss_scale": None},
        help="Least dynamic loss scale.",
    )
    loss_scale_window: int = flag(
        1000,
        at_least=1,
        needs={"fp16": True, "loss_scale": None},
        help="Clean steps before the scale doubles.",
    )
    hysteresis: int = flag(
        2,
        at_least=1,
        needs={"fp16": True, "loss_scale": None},
        help="Overflows borne before the scale halves.",
    )
    override_opt_param_scheduler: bool = flag(
        False,
        aliases=("--override-opt_param-scheduler",),
        excludes="scheduler",
        needs={"load": SET},
        help="On resume the schedule given here wins over the checkpoint's.",
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        aliases=("--use-checkpoint-opt_param-scheduler",),
        excludes="scheduler",
        needs={"load": SET},
        help="On resume the checkpoint's schedule wins over the one given here.",
    )
    use_precision_aware_optimizer: bool = flag(
        False,
        account="memory",
        help="Main parameters as a bf16 parameter and 16 more bits, exactly fp32; moments in chosen dtypes.",
    )
    main_grads_dtype: Literal["fp32", "bf16"] = flag(
        "fp32", account="memory", needs=AWARE, help="Dtype of main gradients."
    )
    main_params_dtype: Literal["fp32", "fp16"] = flag(
        "fp32",
        account="memory",
        needs=AWARE,
        refused={"fp16": HALF_MAIN},
        help="Dtype of main parameters.",
    )
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32",
        account="memory",
        needs=AWARE,
        refused={"fp16": HALF_MOMENTS},
        help="Dtype of the first moment; fp8: 8 bits, with a scale for each 64 elements.",
    )
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32",
        account="memory",
        needs=AWARE,
        refused={"fp16": HALF_MOMENTS},
        help="Dtype of the second moment; fp8: 8 bits, with a scale for each 64 elements.",
    )
    optimizer_cpu_offload: bool = flag(
        False, account="memory", help="Keep main parameters and moments in host memory."
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        account="memory",
        at_least=0,
        at_most=1,
        needs=OFFLOADED,
        help="Share of the optimizer states that is there.",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        True,
        account="memory",
        megatron=False,
        needs=OFFLOADED,
        help="States travel to the device and back while others are updated.",
    )


def offloaded_share(optim: OptimConfig) -> float:
    """Share of the optimizer states that is kept in host memory."""
    return optim.optimizer_offload_fraction if optim.optimizer_cpu_offload else 0.0
