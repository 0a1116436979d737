"""[moe]: mixture of experts. Formulas and the planner read it; training waits for it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import EXPERT_PARALLEL, MOE

EXPERTS = {"num_experts": SET}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(Section):
    """Experts, router and dispatcher."""

    title: ClassVar[str] = "Mixture of experts"
    account: ClassVar[str] = "kernels"

    num_experts: int = flag(
        0, at_least=0, other=8, waits_for=MOE, help="Experts of an MoE layer; 0 is a dense model."
    )
    moe_layer_freq: str = flag(
        "1",
        needs=EXPERTS,
        other="2",
        waits_for=MOE,
        help="Every how many layers is MoE, or a pattern such as ([0]*1+[1]*26).",
    )
    moe_ffn_hidden_size: int | None = flag(
        None, at_least=1, needs=EXPERTS, waits_for=MOE, help="Width of one expert; unset: --ffn-hidden-size."
    )
    moe_router_topk: int = flag(
        2, at_least=1, needs=EXPERTS, waits_for=MOE, help="Experts that a token visits."
    )
    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"
    ] = flag("aux_loss", needs=EXPERTS, waits_for=MOE, help="How the router balances experts.")
    moe_aux_loss_coeff: float = flag(
        0.0, at_least=0, needs=EXPERTS, waits_for=MOE, help="Weight of the balancing loss."
    )
    moe_z_loss_coeff: float | None = flag(
        None, at_least=0, needs=EXPERTS, waits_for=MOE, help="Weight of the router's z-loss."
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = flag(
        "softmax", needs=EXPERTS, waits_for=MOE, help="How logits of the router become scores."
    )
    moe_router_pre_softmax: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="Scores before the choice of experts."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(
        None, needs=EXPERTS, waits_for=MOE, help="Dtype of the router."
    )
    moe_router_enable_expert_bias: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="Balance by a bias on each expert in place of a loss."
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, more_than=0, needs=EXPERTS, waits_for=MOE, help="Step of that bias."
    )
    moe_router_num_groups: int | None = flag(
        None, at_least=1, needs=EXPERTS, waits_for=MOE, help="Groups of experts."
    )
    moe_router_group_topk: int | None = flag(
        None, at_least=1, needs=EXPERTS, waits_for=MOE, help="Groups a token may visit."
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, more_than=0, needs=EXPERTS, waits_for=MOE, help="Factor on the chosen scores."
    )
    moe_router_padding_for_quantization: bool = flag(
        False,
        needs=EXPERTS,
        waits_for=MOE,
        aliases=("--moe-router-padding-for-fp8",),
        help="Pad each expert's tokens for quantized GEMMs.",
    )
    moe_router_fusion: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="Fuse the router's small operators."
    )
    moe_grouped_gemm: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="All experts in one grouped GEMM."
    )
    moe_permute_fusion: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="Fuse the permutation of tokens."
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "allgather",
        account="communication",
        needs=EXPERTS,
        waits_for=MOE,
        help="How tokens reach their experts.",
    )
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = flag(
        "deepep",
        account="communication",
        needs={"moe_token_dispatcher_type": "flex"},
        waits_for=MOE,
        help="Library behind the flex dispatcher.",
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        at_least=1,
        needs=EXPERTS,
        waits_for=MOE,
        help="Total width of the experts that every token visits.",
    )
    moe_shared_expert_gate: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="Gate the shared experts' output."
    )
    moe_shared_expert_overlap: bool = flag(
        False,
        account="communication",
        needs=EXPERTS,
        waits_for=MOE,
        help="Run shared experts during the dispatch.",
    )
    moe_expert_capacity_factor: float | None = flag(
        None, more_than=0, needs=EXPERTS, waits_for=MOE, help="Most tokens of an expert, over the even share."
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False,
        needs={"moe_expert_capacity_factor": SET},
        waits_for=MOE,
        help="Pad every expert to its capacity.",
    )
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "probs",
        needs={"moe_expert_capacity_factor": SET},
        waits_for=MOE,
        help="Which tokens to drop over capacity.",
    )
    moe_per_layer_logging: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="Log the router's losses by layer."
    )
    moe_use_upcycling: bool = flag(
        False, needs=EXPERTS, waits_for=MOE, help="Start experts from a dense checkpoint."
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        account="communication",
        needs=EXPERTS,
        waits_for=EXPERT_PARALLEL,
        help="Overlap the dispatch with another microbatch's compute.",
    )
    delay_wgrad_compute: bool = flag(
        False,
        account="communication",
        needs={"overlap_moe_expert_parallel_comm": True},
        waits_for=EXPERT_PARALLEL,
        help="Delay weight gradients to fill that overlap.",
    )
