"""Rules of recompute, offload, residual norms, and what compiled blocks and graphs allow of them."""

from redline.config.recompute import BESIDE_RESIDUAL_NORM
from redline.config.rules.rule import Broken, rule, rules_of
from redline.config.tree import RunConfig


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
    why="Megatron's graph of a layer cannot hold its recomputation; Redline's is not tested with it.",
)
def graphs_and_full_recompute(config: RunConfig) -> Broken:
    impl = config.compile.cuda_graph_impl
    if config.recompute.recompute_granularity != "full" or impl in ("none", "full_iteration"):
        return None
    what = f"--cuda-graph-impl {impl} does not go with --recompute-granularity full."
    return what, "use selective recompute, or keep one of them (Megatron also has full_iteration)."


@rule(
    "graphs-keep-what-they-save",
    "cuda_graph_impl",
    "recompute",
    "cpu_offloading",
    why="a recorded microbatch is tested with what it saves left in place, or stated modules recomputed.",
)
def graphs_keep_what_they_save(config: RunConfig) -> Broken:
    r = config.recompute
    if config.compile.cuda_graph_impl != "local" or not (r.recompute == "auto" or r.cpu_offloading):
        return None
    other = "--recompute auto" if r.recompute == "auto" else "--cpu-offloading"
    return (
        f"--cuda-graph-impl local does not go with {other}.",
        "use --recompute-granularity selective, or keep one of them.",
    )


RULES = rules_of(globals())
