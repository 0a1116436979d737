"""Model and optimizer of a run: choices first, then the plain model, then its storage, then its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from redline.attention import (
    Attention,
    Calibration,
    Request,
    fused_softmax,
    select_backend,
    unfused_attention,
)
from redline.build.compile import kept_modules
from redline.build.determinism import determinism
from redline.build.kernels import kernel_conditions
from redline.build.tensor_parallel import tensor_parallel
from redline.choice import Choice
from redline.comm import Collectives, Groups, single_process
from redline.config import PrecisionConfig, RunConfig, packs
from redline.errors import ConfigError
from redline.formulas.operators import Operator
from redline.formulas.recompute import Module
from redline.model import (
    Engine,
    EngineFp8,
    Fp8Gemms,
    Fp8Params,
    Transformer,
    check_names,
    fused_ops,
    init_tensors,
    padding_of,
    shared_parameters,
    tensor_parallel_ops,
)
from redline.optim import (
    AdamImpl,
    AdamOptions,
    Away,
    DataParallel,
    FlatBuffers,
    NonFiniteAction,
    Optimizer,
    Sharding,
    SharedParameters,
    make_loss_scale,
)
from redline.plan import Plan, choose_kernels
from redline.precision import DTYPES, NEVER, Fp8Spec, Fp8State, Recipe, make_recipe

SITES_A_LAYER = 4
TOKENS = 32  # of which Transformer Engine's GEMMs in fp8 take multiples, by any recipe
MOMENT_DTYPES = {**DTYPES, "fp8": torch.uint8}  # by 8 bits of our own, which no dtype of torch's names


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a run trains with, every decision made on the way, and the plan that knows of them."""

    plan: Plan
    model: Transformer
    optimizer: Optimizer
    fp8: Fp8Gemms | EngineFp8 | None
    recipe: Recipe
    choices: tuple[Choice, ...]


def assemble(
    config: RunConfig,
    plan: Plan,
    device: torch.device,
    chosen_attention: tuple[Attention, Choice],
    *,
    groups: Groups | None = None,
    interpret: bool = False,
) -> Assembly:
    """Build on the meta device, move the parameters into flat buffers, draw the initial weights.

    Args:
        chosen_attention: of `choose_attention`.
        groups: the ranks that share the model; None for one process.
        interpret: run kernels on a CPU too where they are asked for by name, by Triton's interpreter (to
            test them: it is thousands of times slower).

    Raises: ConfigError when an implementation asked for by name cannot run this model here.
    """
    recipe = make_recipe(plan.precision, grad_in_bf16=plan.dtypes.grad == "bf16")
    attention, attention_choice = chosen_attention
    engine = config.kernels.transformer_impl == "transformer_engine"
    conditions = kernel_conditions(plan, device, attention_choice.ran, engine=engine, interpret=interpret)
    kernels = choose_kernels(config.kernels, plan.shape, conditions)
    if "masked_softmax" in kernels.fused:
        attention = partial(unfused_attention, softmax=fused_softmax)
    kept: frozenset[Module] = frozenset()
    kept_choices: tuple[Choice, ...] = ()
    if config.compile.use_torch_compile:
        kept, kept_choices = kept_modules(attention, plan.microbatch.recompute)
    plan = plan.with_implementation(attention_choice.ran, kernels.fused, kept)
    tp, tp_choices = tensor_parallel(config, plan, groups or single_process(), recipe.compute, device)
    fuse_wgrad = config.kernels.gradient_accumulation_fusion
    ops = fused_ops(kernels.fused, fuse_wgrad=fuse_wgrad)
    model = Transformer(
        plan.shape,
        attention=attention,
        dtype=recipe.compute,
        ops=tensor_parallel_ops(ops, tp, fuse_wgrad=fuse_wgrad),
        tp=tp,
        recompute=plan.microbatch.recompute,
        offload_layers=plan.microbatch.offload_layers,
    )
    groups = groups or single_process()
    sharded = plan.data_parallel.sharded
    if plan.fp8 is not None and plan.fp8.stored:
        store_in_fp8(model, plan.fp8.sites)
    buffers = FlatBuffers(
        model.named_parameters(),
        main_dtype=recipe.main,
        grad_dtype=recipe.grad,
        exp_avg_dtype=MOMENT_DTYPES[plan.dtypes.exp_avg],
        exp_avg_sq_dtype=MOMENT_DTYPES[plan.dtypes.exp_avg_sq],
        remainder=plan.dtypes.remainder,
        device=device,
        sharding=Sharding(rule=plan.data_parallel.rule, index=groups.shard.index, states=sharded),
        away=Away(share=plan.dtypes.away),
    )
    check_names(buffers.parameters, plan.shape)
    # Drawn in full precision; the half copies are rounded from them.
    init_tensors(buffers.write_main_params(), plan.shape, config.train.seed, tp.rank)
    ranks = join_data_parallel(buffers, plan, groups)
    if plan.data_parallel.overlap_gather:
        model.before_part = ranks.gatherer.before
    fp8: Fp8Gemms | EngineFp8 | None
    if engine:
        fp8 = make_engine(config, plan, model, groups)
    else:
        storage = buffers, ranks, recipe.compute
        fp8 = make_fp8(config, plan, model, kernels.fused, groups, device, storage)
    bits = determinism(config.train.deterministic_mode, device.type, attention_choice.ran, kernels.fused)
    shared = SharedParameters(
        tp.group,
        shared_parameters(plan.shape, tp.rank, sequence=tp.sequence),
        padding_of(buffers.parameters.items(), plan.shape, tp.rank),
    )
    optimizer = make_optimizer(config, buffers, recipe, kernels.fused, shared, ranks)
    choices = (*kernels.choices, attention_choice, *kept_choices, *tp_choices, bits)
    return Assembly(plan, model, optimizer, fp8, recipe, choices)


def join_data_parallel(buffers: FlatBuffers, plan: Plan, groups: Groups) -> DataParallel:
    """How the optimizer's ranks meet, as the plan says."""
    ranks = plan.data_parallel
    return DataParallel(
        buffers,
        Collectives(groups.shard, wide_sum=ranks.wide_sum),
        Collectives(groups.replica),
        overlap_reduce=ranks.overlap_reduce,
        overlap_gather=ranks.overlap_gather,
    )


def attention_request(config: RunConfig, plan: Plan, device: torch.device) -> Request:
    """What this run asks of its attention, on one tensor-parallel rank."""
    shape = plan.shape.of_rank(plan.grid.tp)
    return Request(
        device_type=device.type,
        dtype=make_recipe(plan.precision).compute,
        head_dim=shape.head_dim,
        num_heads=shape.num_heads,
        num_groups=shape.num_groups,
        seq_length=plan.microbatch.seq_length,
        batch=plan.microbatch.micro_batch_size,
        dropout=shape.attention_dropout > 0,
        segments=config.data.reset_attention_mask,
        packed=packs(config.data),
        window=shape.window,
        softcap=shape.softcap,
        sinks=shape.softmax_type != "vanilla",
        deterministic=config.train.deterministic_mode,
        flash_version=config.attention.flash_attention_version,
    )


def choose_attention(
    config: RunConfig, plan: Plan, device: torch.device, calibration: Calibration | None = None
) -> tuple[Attention, Choice]:
    """The attention backend of this run.

    Args:
        calibration: with which `--attention-backend auto` compares the backends of a GPU.

    Raises: ConfigError when a backend asked for by name cannot run this model here.
    """
    request = attention_request(config, plan, device)
    return select_backend(config.attention.attention_backend, request, calibration)


def make_fp8(
    config: RunConfig,
    plan: Plan,
    model: Transformer,
    fused: frozenset[Operator],
    groups: Groups,
    device: torch.device,
    storage: tuple[FlatBuffers, DataParallel, torch.dtype],
) -> Fp8Gemms | None:
    """Puts the sites that the plan names into fp8.

    Args:
        storage: of the parameters, how they meet, and the dtype that those not in fp8 have.
    """
    if plan.fp8 is None:
        return None
    spec, options = fp8_spec(config.precision), config.precision
    if spec.recipe == "blockwise" and not spec.emulate and device.type == "cuda":
        _require_cuda_of_blocks(torch.version.cuda)
    state = Fp8State(plan.fp8.sites, spec, device, groups.world, kernels=bool(fused) or device.type == "cuda")
    fuse_wgrad = config.kernels.gradient_accumulation_fusion
    buffers, ranks, compute_dtype = storage
    params = None
    if plan.fp8.stored:
        found = buffers.fp8_parts()
        parts = {site: found[f"{site}.weight"] for site in state.sites}
        params = Fp8Params(state, parts, groups.shard, ranks.gatherer, compute_dtype)
    return Fp8Gemms(
        model,
        state,
        fused=fused,
        fuse_wgrad=fuse_wgrad,
        head=options.fp8_output_proj,
        params=params,
        copies=plan.fp8.copies,
        compiled=config.compile.use_torch_compile,
        keeps_output=plan.microbatch.keeps_attention_output,
        linked=config.overlap.tp_comm_overlap,
        arrival=ranks.gatherer.before if plan.data_parallel.overlap_gather else None,
    )


def store_in_fp8(model: Transformer, sites: Iterable[str]) -> None:
    """Give the weights of these sites, still on the meta device, a byte an element."""
    for site in sites:
        weight = model.get_parameter(f"{site}.weight").to(torch.float8_e4m3fn)
        model.get_submodule(site).weight = torch.nn.Parameter(weight)


def fp8_spec(options: PrecisionConfig) -> Fp8Spec:
    """The options of fp8 as plain values."""
    assert options.fp8_format is not None and options.fp8_recipe != "custom"
    return Fp8Spec(
        format=options.fp8_format,
        recipe=options.fp8_recipe,
        margin=options.fp8_margin,
        interval=options.fp8_interval,
        history_len=options.fp8_amax_history_len,
        algo=options.fp8_amax_compute_algo,
        wgrad=options.fp8_wgrad,
        emulate=options.fp8_emulate,
        patience=options.fp8_return_to_bf16 or NEVER,
    )


def make_engine(config: RunConfig, plan: Plan, model: Transformer, groups: Groups) -> EngineFp8 | None:
    """Puts the modules of transformer-engine at every site, and those that the plan names into fp8.

    Raises: ConfigError where fp8 cannot take one GEMM of a layer (a module holds two), or so many tokens.
    """
    fuse_wgrad = config.kernels.gradient_accumulation_fusion
    if plan.fp8 is None:
        Engine(model, fuse_wgrad=fuse_wgrad)
        return None
    counts = Counter(int(site.split(".")[1]) for site in plan.fp8.sites)
    if min(counts.values()) < SITES_A_LAYER:
        raise ConfigError(
            "--transformer-impl transformer_engine cannot run these layers in fp8.",
            f"{plan.fp8.choices[-1].why}; its modules take a layer's GEMMs into fp8 together.",
            "use --transformer-impl fused, which keeps such a GEMM in bf16.",
        )
    if tokens := plan.microbatch.tokens % TOKENS:
        raise ConfigError(
            f"--transformer-impl transformer_engine cannot take {plan.microbatch.tokens} tokens in fp8.",
            f"its GEMMs take multiples of {TOKENS}; these are {tokens} too many.",
            "choose another --seq-length, or use --transformer-impl fused, which takes any number.",
        )
    in_bf16 = set(range(plan.shape.num_layers)) - set(counts)
    engine = Engine(model, fuse_wgrad=fuse_wgrad, in_bf16=in_bf16)
    return EngineFp8(engine, model, fp8_spec(config.precision), groups.world.handle)


def _require_cuda_of_blocks(version: str | None) -> None:
    """Raise ConfigError unless PyTorch comes with a CUDA whose cuBLAS scales blocks."""
    if version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 9):
        return
    raise ConfigError(
        "--fp8-recipe blockwise cannot run here.",
        f"cuBLAS scales blocks from CUDA 12.9 on; this PyTorch comes with {version or 'none'}.",
        "use --fp8-recipe tensorwise, or a PyTorch with CUDA 12.9.",
    )


def make_optimizer(
    config: RunConfig,
    buffers: FlatBuffers,
    recipe: Recipe,
    fused: Collection[Operator] = (),
    shared: SharedParameters | None = None,
    ranks: DataParallel | None = None,
) -> Optimizer:
    """AdamW on `buffers` as the options say; by Redline's kernels what of it is `fused`."""
    optim, train = config.optim, config.train
    impl: AdamImpl = "triton" if "adamw" in fused else "auto"
    action: NonFiniteAction = train.nonfinite_action if train.check_for_nan_in_loss_and_grad else "ignore"
    return Optimizer(
        buffers,
        adam=AdamOptions(beta1=optim.adam_beta1, beta2=optim.adam_beta2, eps=optim.adam_eps, impl=impl),
        clip_grad=optim.clip_grad,
        loss_scale=make_loss_scale(
            loss_scaling=recipe.loss_scaling,
            loss_scale=optim.loss_scale,
            initial_scale=optim.initial_loss_scale,
            min_scale=optim.min_loss_scale,
            window=optim.loss_scale_window,
            hysteresis=optim.hysteresis,
        ),
        nonfinite_action=action,
        log_num_zeros=config.logging.log_num_zeros_in_grad,
        shared=shared,
        ranks=ranks,
        overlap_away=optim.overlap_cpu_optimizer_d2h_h2d,
        fused_norm="grad_norm" in fused,
    )
