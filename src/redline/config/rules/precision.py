"""Rules of fp8 and of multi-token prediction."""

from redline.config.rules.rule import Broken, rule, rules_of
from redline.config.tree import RunConfig


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
    "fp8-tp-overlap",
    "fp8_format",
    "fp8_recipe",
    "fp8_wgrad",
    "tp_comm_overlap",
    why="rows travel once, a byte a value with one scale, and both GEMMs that read them take those bytes.",
    training=True,
)
def fp8_tp_overlap(config: RunConfig) -> Broken:
    p = config.precision
    if p.fp8_format is None or not config.overlap.tp_comm_overlap:
        return None
    if p.fp8_recipe not in ("delayed", "tensorwise"):
        return (
            f"--fp8-recipe {p.fp8_recipe} does not go with --tp-comm-overlap.",
            "use tensorwise or delayed.",
        )
    if not p.fp8_wgrad:
        return "--no-fp8-wgrad does not go with --tp-comm-overlap.", "keep one of them."
    return None


@rule(
    "fp8-tp-overlap-method",
    "fp8_format",
    "tp_comm_overlap_method",
    why="these methods multiply what has arrived in 16 bits alone.",
    training=True,
)
def fp8_tp_overlap_method(config: RunConfig) -> Broken:
    overlap = config.overlap
    if config.precision.fp8_format is None or not overlap.tp_comm_overlap:
        return None
    if overlap.tp_comm_overlap_method not in ("pushed", "symmetric"):
        return None
    what = f"--tp-comm-overlap-method {overlap.tp_comm_overlap_method} does not go with --fp8-format."
    return what, "use --tp-comm-overlap-method chunked."


@rule(
    "fp4-gather-needs",
    "fp4_param_gather",
    "use_distributed_optimizer",
    why="the main parameters live in the sharded optimizer.",
)
def fp4_gather_needs(config: RunConfig) -> Broken:
    if not config.precision.fp4_param_gather or config.parallel.use_distributed_optimizer:
        return None
    return (
        "--fp4-param-gather is given without --use-distributed-optimizer.",
        "add --use-distributed-optimizer.",
    )


@rule(
    "fp8-gather-recipe",
    "fp8_param_gather",
    "keep_fp8_transpose_cache",
    "fp8_recipe",
    why="with scales of blocks the two layouts of a weight are two casts, each made from the weight itself.",
    training=True,
)
def fp8_gather_recipe(config: RunConfig) -> Broken:
    p = config.precision
    if p.fp8_recipe in ("delayed", "tensorwise") or not (p.fp8_param_gather or p.keep_fp8_transpose_cache):
        return None
    name = "--fp8-param-gather" if p.fp8_param_gather else "--keep-fp8-transpose-cache"
    return f"{name} does not go with --fp8-recipe {p.fp8_recipe}.", "leave it out, or use tensorwise."


@rule(
    "fp8-gather-storage",
    "fp8_param_gather",
    "use_precision_aware_optimizer",
    "fp8_return_to_bf16",
    why="a weight in fp8 alone has no bf16 copy for the other to use.",
    training=True,
)
def fp8_gather_storage(config: RunConfig) -> Broken:
    p = config.precision
    if not p.fp8_param_gather:
        return None
    if config.optim.use_precision_aware_optimizer:
        return "--fp8-param-gather does not go with --use-precision-aware-optimizer.", "keep one of them."
    if p.fp8_return_to_bf16 is not None:
        return "--fp8-param-gather does not go with --fp8-return-to-bf16.", "keep one of them."
    return None


@rule(
    "fp8-casts-kept",
    "parameter_transpose_cache",
    "keep_fp8_transpose_cache",
    "fp8_param_gather",
    "fp8_recipe",
    why="weights are then cast in each pass, whole, from what they are in 16 bits.",
    training=True,
)
def fp8_casts_kept(config: RunConfig) -> Broken:
    p = config.precision
    if p.parameter_transpose_cache:
        return None
    what = "--no-parameter-transpose-cache does not go with"
    if p.keep_fp8_transpose_cache:
        return f"{what} --keep-fp8-transpose-cache.", "keep one of them."
    if p.fp8_param_gather:
        return f"{what} --fp8-param-gather.", "keep one of them: weights in fp8 alone have no other copy."
    if p.fp8_recipe not in ("delayed", "tensorwise"):
        return f"{what} --fp8-recipe {p.fp8_recipe}.", "leave it out, or use tensorwise."
    return None


@rule(
    "fp8-first-last-keeps-some",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    why="with no layer at either end nothing stays in bf16.",
)
def fp8_first_last_keeps_some(config: RunConfig) -> Broken:
    p = config.precision
    counts = p.num_layers_at_start_in_bf16, p.num_layers_at_end_in_bf16
    if not p.first_last_layers_bf16 or counts != (0, 0):
        return None
    return (
        "--first-last-layers-bf16 is given with 0 layers at the start and 0 at the end.",
        "leave it out, or give --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16 1 or more.",
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
