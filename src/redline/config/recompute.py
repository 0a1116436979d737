"""[recompute]: activations dropped and computed again, or kept elsewhere."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import MOE, RETIRED_CHECKPOINTING

BESIDE_RESIDUAL_NORM = ("layernorm", "mlp")  # modules that --fused-residual-rmsnorm cannot let be dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig(Section):
    """What the forward pass saves for the backward pass."""

    title: ClassVar[str] = "Activation recompute"
    account: ClassVar[str] = "memory"

    recompute: Literal["none", "auto"] = flag(
        "none",
        own=True,
        help="auto: the cheapest recompute that fits --memory-budget; none: as the flags below say.",
    )
    memory_budget: float = flag(
        0.9,
        own=True,
        more_than=0,
        at_most=1,
        other=0.5,
        needs={"recompute": "auto"},
        help="Share of all the device's memory (not of what is free of it) that --recompute auto may fill "
        "with the peak, what fragmentation keeps, and the device's context.",
    )
    recompute_granularity: Literal["selective", "full"] | None = flag(
        None,
        shorthands={"--recompute-activations": "selective"},
        help="selective: named modules; full: whole layers; unset: nothing.",
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None,
        needs={"recompute_granularity": "full"},
        help="uniform: all layers, in units; block: the first layers of each stage.",
    )
    recompute_num_layers: int | None = flag(
        None,
        at_least=1,
        needs={"recompute_granularity": "full"},
        help="Layers of a unit (uniform) or layers to recompute (block).",
    )
    recompute_modules: tuple[
        Literal[
            "core_attn", "layernorm", "activation", "mlp", "moe_act", "moe", "shared_experts", "mla_up_proj"
        ],
        ...,
    ] = flag(
        ("core_attn",),
        other=("layernorm",),
        needs={"recompute_granularity": "selective"},
        help="Modules that selective recompute drops; layernorm is the norm of either kind.",
    )
    distribute_saved_activations: bool = flag(
        False,
        needs={"recompute_granularity": "full", "recompute_method": SET},
        help="Each tp rank keeps its part of what full recompute saves.",
    )
    moe_layer_recompute: bool = flag(False, waits_for=MOE, help="Recompute whole MoE layers.")
    checkpoint_activations: bool = flag(
        False, waits_for=RETIRED_CHECKPOINTING, help="Older form of full recompute."
    )
    cpu_offloading: bool = flag(False, help="Keep saved activations of the first layers in host memory.")
    cpu_offloading_num_layers: int = flag(
        0,
        at_least=0,
        needs={"cpu_offloading": True},
        help="Layers whose activations move.",
    )
