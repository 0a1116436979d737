"""Rules of parallelism, overlap, recompute, fp8 and multi-token prediction.

Most concern options that training does not obey yet; the planner and the doctor hold configurations to them.
"""

from redline.config.recompute import BESIDE_RESIDUAL_NORM
from redline.config.rules.rule import Broken, rule, rules_of, show
from redline.config.tree import RunConfig


@rule(
    "tp-divides-heads",
    "tensor_model_parallel_size",
    "num_attention_heads",
    "num_query_groups",
    why="each tp rank holds whole query heads, and whole groups or one group shared evenly.",
)
def tp_divides_heads(config: RunConfig) -> Broken:
    tp, heads = config.parallel.tensor_model_parallel_size, config.model.num_attention_heads
    groups = config.model.num_query_groups or heads
    if heads % tp:
        what = f"--tensor-model-parallel-size {tp} cannot split --num-attention-heads {heads}."
    elif groups % tp and tp % groups:
        what = f"--tensor-model-parallel-size {tp} cannot split --num-query-groups {groups}."
    else:
        return None
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    return what, f"use {', '.join(map(str, fitting[:8]))} ranks, or change the number of heads."


@rule(
    "sequence-parallel-needs-tp",
    "sequence_parallel",
    "tensor_model_parallel_size",
    why="the sequence is split over tp ranks.",
)
def sequence_parallel_needs_tp(config: RunConfig) -> Broken:
    if not config.parallel.sequence_parallel or config.parallel.tensor_model_parallel_size > 1:
        return None
    return "--sequence-parallel is given with --tensor-model-parallel-size 1.", "raise tp, or leave it out."


@rule(
    "compile-and-tp",
    "use_torch_compile",
    "tensor_model_parallel_size",
    why="a block is compiled as one graph, and the collectives inside its GEMMs are no part of a graph.",
    training=True,
)
def compile_and_tp(config: RunConfig) -> Broken:
    tp = config.parallel.tensor_model_parallel_size
    if not config.compile.use_torch_compile or tp == 1:
        return None
    return f"--use-torch-compile does not go with --tensor-model-parallel-size {tp}.", "keep one of them."


@rule(
    "graphs-and-tp",
    "cuda_graph_impl",
    "tensor_model_parallel_size",
    why="a recording of one device does not hold the collectives inside its GEMMs.",
)
def graphs_and_tp(config: RunConfig) -> Broken:
    tp = config.parallel.tensor_model_parallel_size
    if config.compile.cuda_graph_impl != "local" or tp == 1:
        return None
    return f"--cuda-graph-impl local does not go with --tensor-model-parallel-size {tp}.", "keep one of them."


@rule(
    "graphs-and-ranks",
    "cuda_graph_impl",
    "use_distributed_optimizer",
    why="gradients travel while the last backward computes, and a recording does not send them.",
)
def graphs_and_ranks(config: RunConfig) -> Broken:
    if config.compile.cuda_graph_impl != "local" or not config.parallel.use_distributed_optimizer:
        return None
    return "--cuda-graph-impl local does not go with --use-distributed-optimizer.", "keep one of them."


@rule(
    "graphs-and-fp8",
    "cuda_graph_impl",
    "fp8_format",
    why="the cached fp8 weights and the scales are remade outside the recording.",
)
def graphs_and_fp8(config: RunConfig) -> Broken:
    if config.compile.cuda_graph_impl != "local" or config.precision.fp8_format is None:
        return None
    return "--cuda-graph-impl local does not go with fp8.", "keep one of them."


@rule(
    "tp-splits-sequence",
    "sequence_parallel",
    "seq_length",
    "tensor_model_parallel_size",
    "context_parallel_size",
    why="each tp rank holds an equal part of the sequence outside its GEMMs.",
)
def tp_splits_sequence(config: RunConfig) -> Broken:
    p, length = config.parallel, config.train.seq_length
    parts = p.tensor_model_parallel_size * p.context_parallel_size
    if not p.sequence_parallel or length % parts == 0:
        return None
    return (
        f"--seq-length {length} is no multiple of tp x cp = {parts}.",
        f"use {(length // parts + 1) * parts}.",
    )


@rule(
    "cp-splits-sequence",
    "context_parallel_size",
    "seq_length",
    why="each cp rank holds one early and one late chunk of the sequence, for balance.",
)
def cp_splits_sequence(config: RunConfig) -> Broken:
    cp, length = config.parallel.context_parallel_size, config.train.seq_length
    if cp == 1 or length % (2 * cp) == 0:
        return None
    what = f"--seq-length {length} is no multiple of 2 x --context-parallel-size {cp}."
    return what, f"use {(length // (2 * cp) + 1) * 2 * cp}."


@rule(
    "cp-levels",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "context_parallel_size",
    "num_layers",
    why="one way of sending serves all layers, or each layer names its own; a2a+p2p has two levels.",
)
def cp_levels(config: RunConfig) -> Broken:
    p, layers = config.parallel, config.model.num_layers
    kinds, levels = p.cp_comm_type, p.hierarchical_context_parallel_sizes
    if len(kinds) not in (1, layers):
        return (
            f"--cp-comm-type has {len(kinds)} values for {layers} layers.",
            "give one value, or one a layer.",
        )
    if "a2a+p2p" in kinds and not levels:
        return (
            "--cp-comm-type a2a+p2p is given without its levels.",
            "give --hierarchical-context-parallel-sizes.",
        )
    if levels and (len(levels) != 2 or levels[0] * levels[1] != p.context_parallel_size):
        typed = show("hierarchical_context_parallel_sizes", levels)
        what = f"{typed} does not make --context-parallel-size {p.context_parallel_size}."
        return what, "give two sizes whose product it is."
    return None


def _states_split(config: RunConfig) -> bool:
    p = config.parallel
    return bool(
        p.pipeline_model_parallel_layout
        or p.decoder_first_pipeline_num_layers
        or p.decoder_last_pipeline_num_layers
        or p.account_for_embedding_in_pipeline_split
        or p.account_for_loss_in_pipeline_split
    )


@rule(
    "pp-divides-layers",
    "pipeline_model_parallel_size",
    "num_layers",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    why="unless an uneven split is stated, all stages hold the same number of layers.",
)
def pp_divides_layers(config: RunConfig) -> Broken:
    pp, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers
    if layers % pp == 0 or _states_split(config):
        return None
    what = f"--pipeline-model-parallel-size {pp} does not divide --num-layers {layers}."
    return what, "change one of them, or state --decoder-first-pipeline-num-layers."


@rule(
    "split-needs-stages",
    "pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage",
    why="layers are split over pipeline stages.",
)
def split_needs_stages(config: RunConfig) -> Broken:
    p = config.parallel
    virtual = p.num_layers_per_virtual_pipeline_stage or p.num_virtual_stages_per_pipeline_rank
    if p.pipeline_model_parallel_size > 1:
        if p.microbatch_group_size_per_virtual_pipeline_stage and not virtual:
            what = "--microbatch-group-size-per-virtual-pipeline-stage is given without virtual stages."
            return what, "give --num-virtual-stages-per-pipeline-rank, or leave it out."
        return None
    if not (_states_split(config) or virtual or p.microbatch_group_size_per_virtual_pipeline_stage):
        return None
    return (
        "a split over stages is given with --pipeline-model-parallel-size 1.",
        "raise pp, or leave the split out.",
    )


@rule(
    "virtual-stages-divide",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers",
    "pipeline_model_parallel_size",
    why="the layers of a stage are cut into equal virtual stages.",
)
def virtual_stages_divide(config: RunConfig) -> Broken:
    p, pp = config.parallel, config.parallel.pipeline_model_parallel_size
    parts = p.num_layers_per_virtual_pipeline_stage or p.num_virtual_stages_per_pipeline_rank
    layers, odd = divmod(config.model.num_layers, pp)
    if parts is None or odd or layers % parts == 0 or _states_split(config):
        return None
    return (
        f"the {layers} layers of a stage cannot be cut evenly by {parts}.",
        f"choose a divisor of {layers}.",
    )


@rule(
    "experts-divide",
    "num_experts",
    "expert_model_parallel_size",
    "moe_router_topk",
    why="each ep rank holds whole experts, and a token visits no more experts than there are.",
)
def experts_divide(config: RunConfig) -> Broken:
    experts, ep, topk = (
        config.moe.num_experts,
        config.parallel.expert_model_parallel_size,
        config.moe.moe_router_topk,
    )
    if ep > 1 and not experts:
        return (
            f"--expert-model-parallel-size {ep} is given for a dense model.",
            "give --num-experts, or leave it out.",
        )
    if experts % ep:
        return (
            f"--expert-model-parallel-size {ep} does not divide --num-experts {experts}.",
            f"use a divisor of {experts}.",
        )
    if experts and topk > experts:
        return f"--moe-router-topk {topk} exceeds --num-experts {experts}.", f"use {experts} or fewer."
    return None


@rule(
    "gather-overlap-needs",
    "overlap_param_gather",
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    why="parameters are gathered bucket by bucket, as the sharded gradients were reduced.",
)
def gather_overlap_needs(config: RunConfig) -> Broken:
    """B063: overlapped parameter gather needs both other flags, and the error names the missing ones."""
    if not config.overlap.overlap_param_gather:
        return None
    missing = []
    if not config.parallel.use_distributed_optimizer:
        missing.append("--use-distributed-optimizer")
    if not config.overlap.overlap_grad_reduce:
        missing.append("--overlap-grad-reduce")
    if not missing:
        return None
    return (
        f"--overlap-param-gather is given without {' and '.join(missing)}.",
        f"add {' and '.join(missing)}.",
    )


@rule(
    "tp-overlap-needs",
    "tp_comm_overlap",
    "sequence_parallel",
    "tensor_model_parallel_size",
    why="it overlaps the all-gathers and reduce-scatters of sequence parallelism with their GEMMs.",
)
def tp_overlap_needs(config: RunConfig) -> Broken:
    """B065: the conflict is named before anything starts."""
    p = config.parallel
    if not config.overlap.tp_comm_overlap or (p.sequence_parallel and p.tensor_model_parallel_size > 1):
        return None
    missing = "--sequence-parallel" if p.tensor_model_parallel_size > 1 else "tp > 1 and --sequence-parallel"
    return f"--tp-comm-overlap is given without {missing}.", f"add {missing}, or leave it out."


@rule(
    "deterministic-collectives",
    "deterministic_mode",
    "tp_comm_overlap",
    why="overlapped tp collectives add in no fixed order.",
)
def deterministic_collectives(config: RunConfig) -> Broken:
    if not (config.train.deterministic_mode and config.overlap.tp_comm_overlap):
        return None
    return "--deterministic-mode does not go with --tp-comm-overlap.", "keep one of them."


@rule(
    "full-recompute-states",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    why="full recompute works on units of layers.",
)
def full_recompute_states(config: RunConfig) -> Broken:
    r = config.recompute
    if r.recompute_granularity != "full" or (r.recompute_method and r.recompute_num_layers):
        return None
    missing = "--recompute-num-layers" if r.recompute_method else "--recompute-method"
    return (
        f"--recompute-granularity full is given without {missing}.",
        "add --recompute-method uniform --recompute-num-layers 1.",
    )


@rule(
    "recompute-auto-or-stated",
    "recompute",
    "recompute_granularity",
    why="--recompute auto makes the choice that the other flags state.",
)
def recompute_auto_or_stated(config: RunConfig) -> Broken:
    r = config.recompute
    if r.recompute != "auto" or r.recompute_granularity is None:
        return None
    return "--recompute auto is given beside --recompute-granularity.", "keep one of them."


@rule(
    "compiled-blocks-keep-their-modules",
    "use_torch_compile",
    "recompute_granularity",
    why="a block is compiled as one graph, and dropping a module's tensors happens between operators.",
)
def compiled_blocks_keep_their_modules(config: RunConfig) -> Broken:
    if not config.compile.use_torch_compile or config.recompute.recompute_granularity != "selective":
        return None
    return (
        "--use-torch-compile does not go with --recompute-granularity selective.",
        "recompute whole layers: --recompute-granularity full, or --recompute auto.",
    )


@rule(
    "residual-norm-keeps-its-block",
    "fused_residual_rmsnorm",
    "recompute_granularity",
    "recompute_modules",
    why="the norm is one with the residual addition before it, and what it makes is kept.",
)
def residual_norm_keeps_its_block(config: RunConfig) -> Broken:
    r = config.recompute
    dropped = [name for name in r.recompute_modules if name in BESIDE_RESIDUAL_NORM]
    if not config.kernels.fused_residual_rmsnorm or r.recompute_granularity != "selective" or not dropped:
        return None
    return (
        f"--fused-residual-rmsnorm does not go with --recompute-modules {dropped[0]}.",
        "recompute whole layers, or leave one of them out.",
    )


@rule(
    "residual-norm-in-16-bits",
    "fused_residual_rmsnorm",
    "fp8_format",
    why="under fp8 the norm writes the operand of its GEMM in 8 bits, and that kernel takes no residual.",
)
def residual_norm_in_16_bits(config: RunConfig) -> Broken:
    if not config.kernels.fused_residual_rmsnorm or config.precision.fp8_format is None:
        return None
    return "--fused-residual-rmsnorm does not go with --fp8-format.", "keep one of them."


@rule(
    "recompute-modules-exist",
    "recompute_modules",
    "recompute_granularity",
    "num_experts",
    why="what the model does not have cannot be dropped.",
    training=True,
)
def recompute_modules_exist(config: RunConfig) -> Broken:
    r = config.recompute
    if r.recompute_granularity != "selective":
        return None
    absent = {"mla_up_proj": "multi-latent attention"}
    if not config.moe.num_experts:
        absent |= dict.fromkeys(("moe_act", "moe", "shared_experts"), "experts")
    name = next((name for name in r.recompute_modules if name in absent), None)
    if name is None:
        return None
    return f"--recompute-modules {name}: the model has no {absent[name]}.", f"leave {name} out."


@rule(
    "saved-activations-spread",
    "distribute_saved_activations",
    "tensor_model_parallel_size",
    "sequence_parallel",
    why="saved activations are spread over tp ranks, which sequence parallelism does already.",
)
def saved_activations_spread(config: RunConfig) -> Broken:
    p = config.parallel
    if not config.recompute.distribute_saved_activations:
        return None
    if p.tensor_model_parallel_size == 1:
        return "--distribute-saved-activations is given with one tp rank.", "raise tp, or leave it out."
    if p.sequence_parallel:
        return (
            "--distribute-saved-activations does not go with --sequence-parallel.",
            "keep --sequence-parallel.",
        )
    return None


@rule(
    "offloaded-layers-stated",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "num_layers",
    why="offloading moves what the first layers save, as many as are stated.",
    training=True,
)
def offloaded_layers_stated(config: RunConfig) -> Broken:
    r, layers = config.recompute, config.model.num_layers
    if not r.cpu_offloading or 1 <= r.cpu_offloading_num_layers <= (layers or r.cpu_offloading_num_layers):
        return None
    what = f"--cpu-offloading is given with --cpu-offloading-num-layers {r.cpu_offloading_num_layers}."
    return what, f"state 1 to {layers} layers." if layers else "state at least one layer."


@rule(
    "compiled-blocks-stay",
    "use_torch_compile",
    "cpu_offloading",
    why="what a compiled block saves is its graph's own.",
    training=True,
)
def compiled_blocks_stay(config: RunConfig) -> Broken:
    if not (config.compile.use_torch_compile and config.recompute.cpu_offloading):
        return None
    return "--cpu-offloading does not go with --use-torch-compile.", "keep one of them."


@rule(
    "graphs-and-full-recompute",
    "cuda_graph_impl",
    "recompute_granularity",
    why="a graph of a block cannot hold the recomputation of whole layers.",
)
def graphs_and_full_recompute(config: RunConfig) -> Broken:
    impl = config.compile.cuda_graph_impl
    if config.recompute.recompute_granularity != "full" or impl in ("none", "full_iteration"):
        return None
    what = f"--cuda-graph-impl {impl} does not go with --recompute-granularity full."
    return what, "use --cuda-graph-impl full_iteration or selective recompute."


@rule("fp8-or-fp4", "fp8_format", "fp4_format", why="a GEMM's operands have one format.")
def fp8_or_fp4(config: RunConfig) -> Broken:
    if not (config.precision.fp8_format and config.precision.fp4_format):
        return None
    return "--fp8-format does not go with --fp4-format.", "keep one of them."


@rule(
    "fp8-over-half",
    "fp8_format",
    "fp4_format",
    "fp32",
    "fp64",
    why="fp8 GEMMs work beside bf16 or fp16 activations.",
)
def fp8_over_half(config: RunConfig) -> Broken:
    p = config.precision
    if not (p.fp8_format or p.fp4_format) or not (p.fp32 or p.fp64):
        return None
    return f"--{'fp32' if p.fp32 else 'fp64'} does not go with low-precision GEMMs.", "use --bf16."


@rule(
    "fp8-compile",
    "fp8_format",
    "use_torch_compile",
    why="the casts of fp8 keep their scales in a state that a compiled block would freeze.",
    training=True,
)
def fp8_compile(config: RunConfig) -> Broken:
    if config.precision.fp8_format is None or not config.compile.use_torch_compile:
        return None
    return "--fp8-format does not go with --use-torch-compile.", "leave --use-torch-compile out."


@rule(
    "fp8-tp-overlap",
    "fp8_format",
    "tp_comm_overlap",
    why="collectives beside a GEMM in fp8 run before or after it.",
    training=True,
)
def fp8_tp_overlap(config: RunConfig) -> Broken:
    if config.precision.fp8_format is None or not config.overlap.tp_comm_overlap:
        return None
    return "--fp8-format does not go with --tp-comm-overlap.", "leave --tp-comm-overlap out."


@rule(
    "fp8-head-tensor-parallel",
    "fp8_output_proj",
    "tensor_model_parallel_size",
    why="the head in fp8 holds the whole vocabulary.",
    training=True,
)
def fp8_head_tensor_parallel(config: RunConfig) -> Broken:
    tp = config.parallel.tensor_model_parallel_size
    if not config.precision.fp8_output_proj or tp == 1:
        return None
    return f"--fp8-output-proj does not go with --tensor-model-parallel-size {tp}.", "leave it out."


@rule(
    "fp8-gather-needs",
    "fp8_param_gather",
    "fp4_param_gather",
    "use_distributed_optimizer",
    why="the main parameters live in the sharded optimizer.",
)
def fp8_gather_needs(config: RunConfig) -> Broken:
    p = config.precision
    if not (p.fp8_param_gather or p.fp4_param_gather) or config.parallel.use_distributed_optimizer:
        return None
    name = "fp8" if p.fp8_param_gather else "fp4"
    return (
        f"--{name}-param-gather is given without --use-distributed-optimizer.",
        "add --use-distributed-optimizer.",
    )


@rule(
    "mtp-positions",
    "mtp_num_layers",
    "position_embedding_type",
    "mtp_hsm",
    why="each depth shifts the sequence by one, which learned positions would have to follow.",
)
def mtp_positions(config: RunConfig) -> Broken:
    depths, kind = config.mtp.mtp_num_layers, config.model.position_embedding_type
    if depths and kind not in ("rope", "none"):
        return f"--mtp-num-layers {depths} does not go with --position-embedding-type {kind}.", "use rope."
    if config.mtp.mtp_hsm and depths == 1:
        return "--mtp-hsm is given with one depth.", "use --mtp-num-layers 2 or more."
    return None


RULES = rules_of(globals())
