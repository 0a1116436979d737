"""[parallel]: how one model is spread over many ranks. Formulas and the planner read it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import (
    CONTEXT_PARALLEL,
    EXPERT_PARALLEL,
    FSDP,
    PIPELINE_PARALLEL,
)

SHARDED = {"use_distributed_optimizer": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Section):
    """Sizes of the axes, and what is sharded along them."""

    title: ClassVar[str] = "Parallelism"
    account: ClassVar[str] = "communication"

    tensor_model_parallel_size: int = flag(1, at_least=1, help="Ranks that share each layer's matrices (tp).")
    sequence_parallel: bool = flag(
        False,
        account="memory",
        help="Split activations outside tp regions along the sequence.",
    )
    pipeline_model_parallel_size: int = flag(
        1, at_least=1, waits_for=PIPELINE_PARALLEL, help="Stages of layers (pp)."
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        at_least=1,
        excludes="virtual-stages",
        waits_for=PIPELINE_PARALLEL,
        help="Layers of one virtual stage.",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        at_least=1,
        excludes="virtual-stages",
        waits_for=PIPELINE_PARALLEL,
        help="Virtual stages of a rank (vpp).",
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        at_least=1,
        waits_for=PIPELINE_PARALLEL,
        help="Microbatches in a row on one virtual stage; unset: pp.",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, at_least=1, waits_for=PIPELINE_PARALLEL, help="Layers of the first stage."
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, at_least=1, waits_for=PIPELINE_PARALLEL, help="Layers of the last stage."
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, waits_for=PIPELINE_PARALLEL, help="Count the embedding as a layer in the split."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, waits_for=PIPELINE_PARALLEL, help="Count head and loss as a layer in the split."
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        waits_for=PIPELINE_PARALLEL,
        other="Et*3|t*3L",
        metavar="LAYOUT",
        help="The stages spelled out: E embedding, t layer, m MTP, L loss, | boundary, (...)*k repeated.",
    )
    context_parallel_size: int = flag(
        1, at_least=1, waits_for=CONTEXT_PARALLEL, help="Ranks that share each sample's sequence (cp)."
    )
    cp_comm_type: tuple[Literal["p2p", "a2a", "allgather", "all_gather", "a2a+p2p"], ...] = flag(
        ("p2p",),
        waits_for=CONTEXT_PARALLEL,
        other=("a2a",),
        help="How keys and values travel: one, or one a layer.",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag(
        (), at_least=1, waits_for=CONTEXT_PARALLEL, other=(2, 2), help="Sizes of the two levels of a2a+p2p."
    )
    expert_model_parallel_size: int = flag(
        1, at_least=1, waits_for=EXPERT_PARALLEL, help="Ranks that share the experts of a layer (ep)."
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        at_least=1,
        waits_for=EXPERT_PARALLEL,
        needs={"num_experts": SET},
        help="tp inside an expert; unset: tp.",
    )
    use_tp_pp_dp_mapping: bool = flag(False, waits_for=PIPELINE_PARALLEL, help="Rank order tp-cp-ep-pp-dp.")
    use_distributed_optimizer: bool = flag(
        False,
        account="memory",
        help="Shard optimizer states over dp (ZeRO-1).",
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        at_least=1,
        needs=SHARDED,
        help="Shard inside this many groups of dp ranks.",
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, megatron="nccl", help="Collectives; unset: nccl on GPUs, gloo on CPUs."
    )
    distributed_timeout_minutes: float | None = flag(
        None,
        megatron=10.0,
        more_than=0,
        metavar="MINUTES",
        help="Longest wait in a collective; unset: 1 more than --startup-timeout-minutes, at least 10.",
    )
    hang_timeout_seconds: float = flag(
        60.0,
        own=True,
        more_than=0,
        metavar="SECONDS",
        help="End the job, naming the rank, when one has begun nothing new for so long.",
    )
    startup_timeout_minutes: float = flag(
        15.0,
        own=True,
        more_than=0,
        metavar="MINUTES",
        help="The same up to the end of the first step, in evaluations and saves.",
    )
    use_torch_fsdp2: bool = flag(
        False, account="memory", waits_for=FSDP, help="PyTorch's fully sharded data parallel."
    )
    use_megatron_fsdp: bool = flag(
        False,
        account="memory",
        waits_for=FSDP,
        aliases=("--use-custom-fsdp",),
        help="Megatron's fully sharded data parallel.",
    )
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = flag(
        "no_shard", account="memory", waits_for=FSDP, help="What Megatron's FSDP shards."
    )
