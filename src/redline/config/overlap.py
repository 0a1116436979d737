"""[overlap]: communication hidden behind compute."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.waits import (
    AVERAGING,
    LOCAL_ACCUMULATION,
    NCCL_SETTINGS,
    PIPELINE_PARALLEL,
    RETIRED,
    USER_BUFFERS,
)

TP_COMM = {"tp_comm_overlap": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapConfig(Section):
    """Which collectives overlap, and their buckets."""

    title: ClassVar[str] = "Communication overlap"
    account: ClassVar[str] = "communication"

    overlap_grad_reduce: bool | None = flag(
        None,
        megatron=False,
        unset="on where there are dp ranks",
        help="Reduce gradients during the backward pass.",
    )
    overlap_param_gather: bool | None = flag(
        None,
        megatron=False,
        unset="on with the distributed optimizer",
        help="Gather parameters during the forward pass.",
    )
    overlap_param_gather_with_optimizer_step: bool = flag(
        False,
        waits_for=PIPELINE_PARALLEL,
        needs={"overlap_param_gather": True},
        help="Start that gather inside the optimizer step.",
    )
    align_grad_reduce: bool | None = flag(
        None,
        megatron=True,
        built_in="there is one pipeline stage, whose ranks all start together.",
        help="All stages start their gradient reduction together.",
    )
    align_param_gather: bool | None = flag(
        None,
        megatron=True,
        built_in="there is one pipeline stage, whose ranks all start together.",
        help="All stages start their parameter gather together.",
    )
    overlap_p2p_communication: bool | None = flag(
        None,
        megatron=True,
        waits_for=PIPELINE_PARALLEL,
        already=(False,),
        help="Overlap sends between stages; unset: on with virtual stages.",
    )
    overlap_p2p_communication_warmup_flush: bool = flag(
        False, waits_for=PIPELINE_PARALLEL, help="The same during warm-up and cool-down of the pipeline."
    )
    ddp_bucket_size: int | None = flag(
        None, at_least=1, excludes="buckets", help="Elements of a gradient bucket."
    )
    ddp_num_buckets: int | None = flag(None, at_least=1, excludes="buckets", help="Gradient buckets.")
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(
        False, help="Pad buckets to sizes that NCCL moves fastest."
    )
    ddp_average_in_collective: bool = flag(False, waits_for=AVERAGING, help="Average inside the collective.")
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(
        False,
        needs={"grad_reduce_in_bf16": True, "use_distributed_optimizer": True},
        help="Send bf16 gradients, sum them in fp32.",
    )
    ddp_param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = flag(
        (), waits_for=LOCAL_ACCUMULATION, help="Parameters whose gradients are accumulated in fp32."
    )
    use_nccl_ub: bool = flag(False, waits_for=NCCL_SETTINGS, help="Register buckets with NCCL.")
    use_sharp: bool = flag(False, waits_for=NCCL_SETTINGS, help="Reduce inside the network's switches.")
    nccl_communicator_config_path: str | None = flag(
        None, metavar="FILE", waits_for=NCCL_SETTINGS, help="YAML file with settings of each NCCL group."
    )
    tp_comm_overlap: bool = flag(False, help="Overlap tp collectives with their GEMMs.")
    tp_comm_overlap_method: Literal["auto", "plain", "chunked", "pushed", "symmetric"] = flag(
        "auto",
        own=True,
        needs=TP_COMM,
        help="How: in pieces, or over NVLink by copies or symmetric memory; auto: the fastest measured.",
    )
    tp_comm_overlap_chunks: int | None = flag(
        None,
        own=True,
        at_least=1,
        needs={**TP_COMM, "tp_comm_overlap_method": ("auto", "chunked")},
        help="Pieces of each collective; unset: measured, or 2.",
    )
    tp_comm_overlap_cfg: str | None = flag(
        None,
        metavar="FILE",
        waits_for=USER_BUFFERS,
        needs=TP_COMM,
        help="YAML file with settings of each GEMM.",
    )
    tp_comm_overlap_ag: bool = flag(True, needs=TP_COMM, help="Overlap all-gather with GEMM.")
    tp_comm_overlap_rs: bool = flag(True, needs=TP_COMM, help="Overlap GEMM with reduce-scatter.")
    tp_comm_bulk_wgrad: bool = flag(
        True, needs=TP_COMM, help="Gather the weight gradient's input under the dgrad GEMM."
    )
    tp_comm_bulk_dgrad: bool = flag(
        True, needs=TP_COMM, help="Scatter the input's gradient under the wgrad GEMM."
    )
    tp_comm_overlap_rs_dgrad: bool = flag(
        False,
        needs={**TP_COMM, "tp_comm_overlap_rs": True},
        help="Scatter in pieces with the dgrad GEMM instead.",
    )
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = flag(
        "nccl", waits_for=USER_BUFFERS, needs=TP_COMM, help="Group that sets up the overlap's buffers."
    )
    tp_comm_split_ag: bool = flag(False, waits_for=RETIRED, help="Older form of --tp-comm-overlap-ag.")
    tp_comm_split_rs: bool = flag(False, waits_for=RETIRED, help="Older form of --tp-comm-overlap-rs.")
    tp_comm_atomic_ag: bool = flag(False, waits_for=RETIRED, help="Older form of --tp-comm-overlap-ag.")
    tp_comm_atomic_rs: bool = flag(False, waits_for=RETIRED, help="Older form of --tp-comm-overlap-rs.")
