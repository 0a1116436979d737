"""Rules of `--transformer-impl transformer_engine`: what its modules leave no room for."""

from redline.config.rules.rule import Broken, rule, rules_of, show
from redline.config.tree import RunConfig, value_of

IMPL = "--transformer-impl transformer_engine"
MEND = "leave it out, or use --transformer-impl fused."


def _beside(config: RunConfig, **allowed: object) -> Broken:
    """The first option with another value than the one that goes with these modules."""
    if config.kernels.transformer_impl != "transformer_engine":
        return None
    for name, value in allowed.items():
        if value_of(config, name) != value:
            return f"{IMPL} does not go with {show(name, value_of(config, name))}.", MEND
    return None


@rule(
    "transformer-engine-on-one-rank",
    "transformer_impl",
    "tensor_model_parallel_size",
    why="its modules hold whole matrices here.",
    training=True,
)
def transformer_engine_on_one_rank(config: RunConfig) -> Broken:
    return _beside(config, tensor_model_parallel_size=1)


@rule(
    "transformer-engine-runs-eagerly",
    "transformer_impl",
    "use_torch_compile",
    "cuda_graph_impl",
    why="its modules keep state on the host, which a graph would freeze.",
    training=True,
)
def transformer_engine_runs_eagerly(config: RunConfig) -> Broken:
    return _beside(config, use_torch_compile=False, cuda_graph_impl="none")


@rule(
    "transformer-engine-fuses-by-itself",
    "transformer_impl",
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "fused_residual_rmsnorm",
    "fp64",
    why="norm, GEMMs and activation are one module of the package.",
    training=True,
)
def transformer_engine_fuses_by_itself(config: RunConfig) -> Broken:
    unset = _beside(config, bias_gelu_fusion=None, bias_swiglu_fusion=None)
    return unset or _beside(config, fused_residual_rmsnorm=False, fp64=False)


@rule(
    "transformer-engine-gates-plainly",
    "transformer_impl",
    "activation_func_clamp_value",
    "glu_linear_offset",
    why="the activation inside its MLP has neither limit nor offset.",
    training=True,
)
def transformer_engine_gates_plainly(config: RunConfig) -> Broken:
    return _beside(config, activation_func_clamp_value=None, glu_linear_offset=0.0)


@rule(
    "transformer-engine-keeps-its-tensors",
    "transformer_impl",
    "recompute",
    "recompute_granularity",
    "recompute_modules",
    "cpu_offloading",
    "fp8_format",
    why="what a module saves is its own; in fp8 a second forward would cast by other scales.",
    training=True,
)
def transformer_engine_keeps_its_tensors(config: RunConfig) -> Broken:
    r, in_fp8 = config.recompute, config.precision.fp8_format is not None
    chosen = _beside(config, cpu_offloading=False, recompute="none")
    if chosen or config.kernels.transformer_impl != "transformer_engine":
        return chosen
    if r.recompute_granularity == "full" and in_fp8:
        return f"{IMPL} in fp8 does not go with --recompute-granularity full.", MEND
    inside = {"layernorm", "activation", *(("mlp",) if in_fp8 else ())}
    name = next((name for name in r.recompute_modules if name in inside), None)
    if r.recompute_granularity != "selective" or name is None:
        return None
    return f"{IMPL} does not go with --recompute-modules {name}.", "recompute core_attn alone."


@rule(
    "transformer-engine-casts-by-itself",
    "transformer_impl",
    "fp8_wgrad",
    "fp8_interval",
    "fp8_keep_bf16",
    "fp8_emulate",
    "fp8_stats_interval",
    "fp8_return_to_bf16",
    "fp8_output_proj",
    "fp8_param_gather",
    "keep_fp8_transpose_cache",
    "parameter_transpose_cache",
    why="its recipes decide how each GEMM casts, and tell nobody what that lost.",
    training=True,
)
def transformer_engine_casts_by_itself(config: RunConfig) -> Broken:
    cast = _beside(config, fp8_wgrad=True, fp8_interval=1, fp8_keep_bf16=(), fp8_emulate=False)
    kept = _beside(
        config, fp8_output_proj=False, keep_fp8_transpose_cache=False, parameter_transpose_cache=True
    )
    alone = _beside(config, fp8_param_gather=None) if config.precision.fp8_param_gather else None
    return cast or kept or alone or _beside(config, fp8_stats_interval=None, fp8_return_to_bf16=None)


RULES = rules_of(globals())
