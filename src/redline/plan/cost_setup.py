"""What the cost model reads of a configuration: every default resolved as the program that runs it would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from redline.config import RunConfig
from redline.config.flags import UNSET
from redline.config.tree import options_by_field, value_of
from redline.formulas.activations import Joined
from redline.formulas.resolve import shape_of
from redline.formulas.shape import ModelShape
from redline.formulas.state import StateDtypes
from redline.formulas.traffic import gathered_bytes_each, skipped_share
from redline.plan.dtypes import state_dtypes
from redline.plan.fp8 import kept_beside, kept_casts, weight_passes
from redline.plan.grid import RankGrid, make_grid
from redline.units import MIB

Dialect = Literal["redline", "megatron"]
Sharding = Literal["none", "optimizer", "gradients", "parameters"]
TpOverlap = Literal["", "plain", "chunked", "peers"]
Fp8Rows = Literal["", "kept", "bytes"]
BUCKET = 40_000_000  # elements of a gradient bucket at least; Megatron's rule is 1e6 a rank above that
DEFAULT_BUCKET_MIB = BUCKET * 4 / MIB
UNKNOWN_VOCAB = 128_000  # where nothing states the vocabulary: of today's models


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One training step, as far as its time and memory depend on it.

    Attributes:
        impl: "transformer_engine" and "fused" run fused norms and GEMM sites, "local" plain ones.
        attention: "flash", "fused" (neither keeps scores), or "unfused".
        fp8: recipe of the GEMMs' operands, None for 16 bits.
        recompute: "none", "selective" or "full" (then `recompute_layers` of a chunk are dropped).
        fp8_copies: casts of each weight that are kept: by rows, and transposed too.
        fp8_weight_passes: bytes a weight that each forward and each backward moves to have its casts.
        spread_inputs: each tp rank keeps its part of what full recompute saves.
        sharding: what is split over dp, `instances` times over.
        tp_overlap: what joins tp's collectives to their GEMMs; "peers" write each other's memory.
        fp8_rows: how rows travel that a GEMM reads in fp8: in 16 bits, and again for the weight gradient, as
            any others; in 16 bits, and "kept"; or as "bytes".
        ordered: asynchronous collectives start when they are issued (one hardware queue for tp and cp, or a
            GPU that needs none; several queues for an FSDP).
        states: how parameters, gradients and optimizer states are stored.
        useful: share of the tokens that count: in no padding, in no step that a loss scale throws away.
    """

    shape: ModelShape
    grid: RankGrid
    vpp: int = 1
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    dtype: str = "bf16"
    fp8: str | None = None
    impl: str = "transformer_engine"
    attention: str = "flash"
    fused_activation: bool = True
    fused_softmax: bool = True
    fused_loss: bool = False
    wgrad_fusion: bool = True
    recompute: str = "none"
    recompute_method: str = "uniform"
    recompute_layers: int = 1
    recompute_modules: tuple[str, ...] = ()
    spread_inputs: bool = False
    fp8_copies: int = 0
    fp8_weight_passes: tuple[int, int] = (0, 0)
    sequence_parallel: bool = False
    sharding: Sharding = "none"
    instances: int = 1
    grad_bytes: int = 4
    states: StateDtypes = field(default_factory=StateDtypes)
    gather_bytes: float = 2
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_overlap: TpOverlap = ""
    fp8_rows: Fp8Rows = ""
    joined: Joined = ""
    overlap_p2p: bool = True
    overlap_experts: bool = False
    bucket_elements: int = BUCKET
    balanced_ends: bool = False
    grouped_experts: bool = False
    dispatcher: str = "alltoall"
    cuda_graph: bool = False
    compiled: bool = False
    ordered: bool = True
    useful: float = 1.0

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank (its part of the sequence under cp)."""
        return self.seq_length * self.micro_batch_size / self.grid.cp

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step."""
        return self.num_microbatches * self.micro_batch_size * self.grid.dp

    @property
    def shard_ranks(self) -> int:
        """Ranks that share what is split over dp and cp."""
        return max(1, self.grid.dp * self.grid.cp // self.instances)

    @property
    def layers_per_stage(self) -> int:
        """Layers of the fullest stage."""
        layers = self.shape.num_layers + (2 if self.balanced_ends else 0)
        return -(-layers // self.grid.pp)


def effective(
    config: RunConfig, name: str, dialect: Dialect = "redline", stated: frozenset[str] | None = None
) -> Any:
    """The value of an option as the program of that dialect takes it: stated, else that program's default.

    `stated` None takes every value that is not Redline's default as stated.
    """
    value, option = value_of(config, name), options_by_field()[name]
    is_stated = value != option.default if stated is None else name in stated
    default = option.spec.megatron
    if dialect == "redline" or is_stated or default is UNSET or default == "required":
        return value
    return default


def joined_by(config: RunConfig) -> Joined:
    """What may join tp's collectives to GEMMs by memory that peers write; in fp8 nothing does."""
    overlap = config.overlap
    method = overlap.tp_comm_overlap_method
    if not overlap.tp_comm_overlap or config.precision.fp8_format or method == "plain" or method == "chunked":
        return ""
    return method


def _tp_overlap(config: RunConfig, dialect: Dialect) -> TpOverlap:
    """What joins tp's collectives to their GEMMs; of what is measured at the start, what may be promised.

    In fp8 `auto` measures plain and pieces alone, without the one queue that pieces hide by.
    """
    overlap = config.overlap
    if not (overlap.tp_comm_overlap and config.parallel.sequence_parallel):
        return ""
    method = "auto" if dialect == "megatron" else overlap.tp_comm_overlap_method
    if method == "plain" or method == "chunked":
        return method
    return "plain" if dialect == "redline" and config.precision.fp8_format else "peers"


def _fp8_rows(config: RunConfig, dialect: Dialect) -> Fp8Rows:
    """How rows travel that a GEMM of Redline's reads in fp8."""
    if dialect == "megatron" or not config.precision.fp8_format:
        return ""
    return "bytes" if config.overlap.tp_comm_overlap else "kept"


def setup_of(
    config: RunConfig,
    world_size: int,
    *,
    dialect: Dialect = "redline",
    stated: frozenset[str] | None = None,
    vocab_size: int | None = None,
    ordered: bool = True,
    flash_available: bool = True,
) -> Setup:
    """The Setup of `config` on `world_size` devices.

    Args:
        dialect: whose defaults stand where nothing is stated.
        vocab_size: of the tokenizer, where the configuration does not state it.
        flash_available: a device without flash attention (before Turing) runs plain attention.

    Raises: ConfigError when the ranks, the batch or the model's numbers do not fit together.
    """

    def get(name: str) -> Any:
        return effective(config, name, dialect, stated)

    p, train = config.parallel, config.train
    grid = make_grid(
        world_size,
        tp=p.tensor_model_parallel_size,
        pp=p.pipeline_model_parallel_size,
        cp=p.context_parallel_size,
        ep=p.expert_model_parallel_size,
        etp=p.expert_tensor_parallel_size,
        pp_before_dp=p.use_tp_pp_dp_mapping,
    )
    model = config.model
    vocab = model.vocab_size or vocab_size or model.padded_vocab_size or UNKNOWN_VOCAB
    shape = shape_of(config.model, train.seq_length, vocab, grid.tp, moe=config.moe, mtp=config.mtp)
    unit = train.micro_batch_size * grid.dp
    size = train.global_batch_size or unit
    impl = _impl(get("transformer_impl"), dialect)
    fused = impl != "local"
    recompute = get("recompute_granularity") or "none"
    vpp = virtual_stages(config)
    shard = _sharding(config)
    overlaps = dialect == "redline" and grid.dp > 1
    states = state_dtypes(_dtype(config, dialect), config.precision, config.optim)
    return Setup(
        shape=shape,
        grid=grid,
        vpp=vpp,
        seq_length=train.seq_length,
        micro_batch_size=train.micro_batch_size,
        num_microbatches=max(1, size // unit),
        dtype=states.param,
        fp8=get("fp8_recipe") if get("fp8_format") and impl != "local" else None,
        impl=impl,
        attention=_attention(get("attention_backend"), impl, dialect, flash_available),
        fused_activation=fused or (dialect == "megatron" and _activation_fused(config, get)),
        fused_softmax=_on(get("masked_softmax_fusion"), True) and dialect == "megatron",
        fused_loss=_on(get("cross_entropy_loss_fusion"), impl == "fused"),
        wgrad_fusion=get("gradient_accumulation_fusion"),
        recompute=recompute,
        recompute_method=config.recompute.recompute_method or "uniform",
        recompute_layers=config.recompute.recompute_num_layers or 1,
        recompute_modules=config.recompute.recompute_modules if recompute == "selective" else (),
        spread_inputs=config.recompute.distribute_saved_activations,
        fp8_copies=_fp8_copies(config, impl, dialect),
        fp8_weight_passes=weight_passes(config) if dialect == "redline" else (0, 0),
        sequence_parallel=p.sequence_parallel and grid.tp > 1,
        sharding=shard,
        instances=p.num_distributed_optimizer_instances,
        grad_bytes=2 if states.grad == "bf16" else 4,
        states=states,
        gather_bytes=gathered_bytes_each(shape, _stored_in_fp8(config, dialect)),
        overlap_grad_reduce=_on(get("overlap_grad_reduce"), overlaps) or shard in ("gradients", "parameters"),
        overlap_param_gather=_on(get("overlap_param_gather"), overlaps) or shard == "parameters",
        tp_overlap=_tp_overlap(config, dialect),
        fp8_rows=_fp8_rows(config, dialect),
        joined=joined_by(config) if dialect == "redline" and p.sequence_parallel else "",
        overlap_p2p=_on(get("overlap_p2p_communication"), True) and vpp > 1,
        overlap_experts=config.moe.overlap_moe_expert_parallel_comm,
        bucket_elements=config.overlap.ddp_bucket_size or max(BUCKET, 1_000_000 * grid.dp * grid.cp),
        balanced_ends=p.account_for_embedding_in_pipeline_split and p.account_for_loss_in_pipeline_split,
        grouped_experts=config.moe.moe_grouped_gemm,
        dispatcher=config.moe.moe_token_dispatcher_type,
        cuda_graph=config.compile.cuda_graph_impl != "none",
        compiled=config.compile.use_torch_compile,
        ordered=ordered,
        useful=_kept_share(config),
    )


def _kept_share(config: RunConfig) -> float:
    """Share of the steps that are not thrown away by fp16's dynamic loss scale (bf16 needs none)."""
    optim = config.optim
    if not config.precision.fp16 or optim.loss_scale is not None:
        return 1.0
    return 1.0 - skipped_share(max(1, optim.loss_scale_window), max(0, optim.hysteresis))


def virtual_stages(config: RunConfig) -> int:
    """Virtual stages of a pipeline rank, 1 where layers are not interleaved."""
    p = config.parallel
    if p.pipeline_model_parallel_size == 1:
        return 1
    if p.num_virtual_stages_per_pipeline_rank:
        return p.num_virtual_stages_per_pipeline_rank
    if p.num_layers_per_virtual_pipeline_stage:
        stage = config.model.num_layers // p.pipeline_model_parallel_size
        return max(1, stage // p.num_layers_per_virtual_pipeline_stage)
    return 1


def _stored_in_fp8(config: RunConfig, dialect: Dialect) -> bool:
    """Whether the weights that GEMMs read in fp8 exist in it alone."""
    p = config.precision
    if dialect == "megatron":
        return bool(p.fp8_param_gather)
    return p.fp8_format is not None and not kept_beside(config)


def _fp8_copies(config: RunConfig, impl: str, dialect: Dialect) -> int:
    """Casts beside the weights: Transformer Engine keeps both layouts, Redline one where it is not asked."""
    p = config.precision
    if p.fp8_format is None or impl == "local":
        return 0
    stored = _stored_in_fp8(config, dialect)  # then the weights are the casts
    if dialect == "redline":
        return kept_casts(config) - stored
    return 0 if stored else 1 + (impl == "transformer_engine")


def _impl(asked: str, dialect: Dialect) -> str:
    if asked == "auto":
        return "transformer_engine" if dialect == "megatron" else "fused"
    return asked


def _attention(asked: str, impl: str, dialect: Dialect, flash_available: bool) -> str:
    if not flash_available or asked == "unfused":
        return "unfused"
    if dialect == "megatron" and (impl == "local" or asked == "local"):
        return "unfused"  # Megatron's own module writes the scores, whatever the flag says
    return "flash" if asked in ("auto", "local") else asked


def _activation_fused(config: RunConfig, get: Any) -> bool:
    """Megatron fuses bias and activation in either implementation; plain GELU needs a bias for it."""
    if config.model.activation_func == "swiglu":
        return _on(get("bias_swiglu_fusion"), True)
    return _on(get("bias_gelu_fusion"), True) and config.model.add_bias_linear


def _dtype(config: RunConfig, dialect: Dialect) -> str:
    for name in ("bf16", "fp16", "fp32", "fp64"):
        if getattr(config.precision, name):
            return name
    return "fp32" if dialect == "megatron" else "bf16"


def _sharding(config: RunConfig) -> Sharding:
    p = config.parallel
    if p.use_torch_fsdp2:
        return "parameters"
    if p.use_megatron_fsdp:
        named: dict[str, Sharding] = {
            "no_shard": "none",
            "optim": "optimizer",
            "optim_grads": "gradients",
            "optim_grads_params": "parameters",
        }
        return named[p.data_parallel_sharding_strategy]
    return "optimizer" if p.use_distributed_optimizer else "none"


def _on(value: bool | None, default: bool) -> bool:
    return default if value is None else value
