"""Rules of parallelism, overlap and CUDA graphs beside them.

Many concern options that training does not obey yet; the planner and the doctor hold configurations to them.
"""

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
    "compile-and-tp-overlap",
    "use_torch_compile",
    "tp_comm_overlap",
    why="overlapped GEMMs send their pieces themselves, which are no part of the graph of a block.",
    training=True,
)
def compile_and_tp_overlap(config: RunConfig) -> Broken:
    if not (config.compile.use_torch_compile and config.overlap.tp_comm_overlap):
        return None
    return "--use-torch-compile does not go with --tp-comm-overlap.", "keep one of them."


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
    "wide-sum-and-instances",
    "ddp_reduce_scatter_with_fp32_accumulation",
    "num_distributed_optimizer_instances",
    why="sums across instances are all-reduces, which add up bf16 gradients in bf16.",
)
def wide_sum_and_instances(config: RunConfig) -> Broken:
    instances = config.parallel.num_distributed_optimizer_instances
    if not config.overlap.ddp_reduce_scatter_with_fp32_accumulation or instances == 1:
        return None
    what = "--ddp-reduce-scatter-with-fp32-accumulation does not go with"
    return (
        f"{what} --num-distributed-optimizer-instances {instances}.",
        "keep one of them, or leave out --grad-reduce-in-bf16.",
    )


@rule(
    "chunks-of-rows",
    "tp_comm_overlap_chunks",
    "seq_length",
    "micro_batch_size",
    "tensor_model_parallel_size",
    why="pieces are equal runs of a rank's rows, the last one perhaps shorter.",
)
def chunks_of_rows(config: RunConfig) -> Broken:
    chunks, train = config.overlap.tp_comm_overlap_chunks, config.train
    rows = train.seq_length * train.micro_batch_size // config.parallel.tensor_model_parallel_size
    if chunks is None or rows < 1:
        return None
    pieces = -(-rows // -(-rows // chunks))
    if pieces == chunks:
        return None
    return f"--tp-comm-overlap-chunks {chunks} cannot cut {rows} rows of a rank.", f"use {pieces}."


@rule(
    "straggler-and-joined-gemms",
    "log_straggler",
    "tensor_model_parallel_size",
    "tp_comm_overlap_method",
    "use_torch_compile",
    why="a rank's own time leaves out its waits, and inside joined GEMMs and graphs nobody sees them.",
    training=True,
)
def straggler_and_joined_gemms(config: RunConfig) -> Broken:
    overlap = config.overlap
    joined = overlap.tp_comm_overlap and overlap.tp_comm_overlap_method not in ("plain", "chunked")
    shared = config.parallel.tensor_model_parallel_size > 1
    if not (config.logging.log_straggler and shared and (joined or config.compile.use_torch_compile)):
        return None
    other = "--use-torch-compile"
    if joined:
        other = f"--tp-comm-overlap-method {overlap.tp_comm_overlap_method}"
    what = f"--log-straggler does not go with {other} on tensor-parallel ranks."
    return what, "use --tp-comm-overlap-method chunked." if joined else "keep one of them."


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


RULES = rules_of(globals())
