"""Which GEMM sites run in fp8, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from redline.choice import Choice
from redline.config import PrecisionConfig, RunConfig
from redline.errors import ConfigError
from redline.formulas.fp8_sizes import FP8_MULTIPLES, Copies
from redline.formulas.shape import ModelShape
from redline.formulas.traffic import HALF
from redline.hardware import ADA, BLACKWELL, HOPPER, Hardware

HEAD_MULTIPLE = FP8_MULTIPLES["tensorwise"]  # the head's scales are measured, by every recipe
MEASURED_WHOLE = ("delayed", "tensorwise")  # recipes of one scale a tensor
BESIDE_FP8 = "in bf16 beside fp8"  # the choice that names GEMMs which stay


@dataclass(frozen=True, slots=True)
class Fp8Plan:
    """Names of the sites that run in fp8, such as "layers.0.attention.qkv", and the record of why.

    Attributes:
        weights, head: elements of their matrices, and of the head's on a rank where it runs in fp8.
        copies: fp8 casts of each weight that are kept; the others are made as they are needed.
        stored: the weights exist in fp8 alone.
        others: GEMMs of the layers that stay in bf16.
        where: what computes the products in fp8, as the end of a sentence.
    """

    sites: tuple[str, ...]
    weights: int
    choices: tuple[Choice, ...]
    head: int = 0
    copies: Copies = 2
    stored: bool = False
    others: int = 0
    where: str = ""

    def choices_after(self, returned: Mapping[str, int]) -> tuple[Choice, ...]:
        """`choices` once some sites have returned to bf16, each at the end of its step."""
        back = {site: returned[site] for site in self.sites if site in returned}
        if not back:
            return self.choices
        first, *rest = self.choices
        left, steps = len(self.sites) - len(back), sorted(set(back.values()))
        when = f"at step {steps[0]}" if len(steps) == 1 else f"at steps {steps[0]} to {steps[-1]}"
        why = _counted(left, len(self.sites) + self.others, self.head > 0)
        first = replace(
            first,
            ran=first.ran if left or self.head else "bf16",
            why=f"{why}; {len(back)} returned to bf16 {when}; {self.where}",
        )
        named = _listed([f"{site} (step {step})" for site, step in back.items()])
        last = Choice(BESIDE_FP8, "fp8", "bf16", f"{named}: saturated too often for --fp8-return-to-bf16")
        return first, *rest, last


def gemm_sites(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """(name, output size, input size) of every GEMM in the layers, in the model's order."""
    for layer in range(shape.num_layers):
        yield f"layers.{layer}.attention.qkv", shape.q_size + 2 * shape.kv_size, shape.hidden
        yield f"layers.{layer}.attention.proj", shape.hidden, shape.q_size
        yield f"layers.{layer}.mlp.fc1", shape.fc1_size, shape.hidden
        yield f"layers.{layer}.mlp.fc2", shape.hidden, shape.ffn


def kept_beside(run: RunConfig) -> str:
    """Why the weights of GEMMs in fp8 exist in 16 bits as well; "" where they do not."""
    config = run.precision
    if config.fp8_param_gather is False:
        return "--no-fp8-param-gather"
    if not config.parameter_transpose_cache:
        return "--no-parameter-transpose-cache: each pass casts them anew"
    if run.kernels.transformer_impl == "transformer_engine":
        return "NVIDIA's modules cast them by themselves"
    if config.fp8_recipe not in MEASURED_WHOLE:
        return "with scales of blocks each layout is cast from them"
    if run.optim.use_precision_aware_optimizer:
        return "--use-precision-aware-optimizer: they are half of the main parameters"
    return "--fp8-return-to-bf16: a GEMM may need them" if config.fp8_return_to_bf16 is not None else ""


def kept_casts(run: RunConfig) -> Copies:
    """Casts of each weight that a step keeps: none, rows, or both layouts; a weight in fp8 alone is one."""
    config = run.precision
    apart = config.fp8_recipe not in MEASURED_WHOLE or run.kernels.transformer_impl == "transformer_engine"
    if config.keep_fp8_transpose_cache or apart:
        return 2
    return 1 if config.parameter_transpose_cache else 0


def weight_passes(run: RunConfig) -> tuple[int, int]:
    """Bytes a weight that each forward and each backward pass reads and writes to have its casts."""
    if run.precision.fp8_format is None:
        return 0, 0
    cast = 2 * HALF + 1 if run.precision.fp8_recipe == "tensorwise" else HALF + 1
    passes: dict[Copies, tuple[int, int]] = {0: (cast, cast), 1: (0, 2), 2: (0, 0)}
    return passes[kept_casts(run)]


def plan_fp8(run: RunConfig, shape: ModelShape, hardware: Hardware, head_rows: int) -> Fp8Plan | None:
    """The sites of this run in fp8; None without `--fp8-format`.

    Args:
        shape: of the part that one rank holds: its matrices are what GEMMs multiply.
        head_rows: the vocabulary's that one rank holds, padded.

    Raises: ConfigError where the card has no fp8 units, a pattern matches no site, none would run in fp8, or
        the head is to and cannot.
    """
    config = run.precision
    if config.fp8_format is None:
        return None
    _require_units(config, hardware)
    _require_e4m3(run, hardware)
    _require_matches(config.fp8_keep_bf16, [name for name, _, _ in gemm_sites(shape)])
    if config.fp8_output_proj:
        _require_head(head_rows, shape.hidden)
    kept: dict[str, list[str]] = {}
    sites, weights = [], 0
    for name, size_out, size_in in gemm_sites(shape):
        reason = _reason(config, shape, name, size_out, size_in)
        if reason is None:
            sites.append(name)
            weights += size_out * size_in
        else:
            kept.setdefault(reason, []).append(name)
    if not sites:
        reasons = "; ".join(f"{_listed(names)}: {reason}" for reason, names in kept.items())
        raise ConfigError(
            "--fp8-format has nothing to act on.",
            f"every GEMM of the layers stays in bf16: {reasons}.",
            "leave it out, or change what keeps them.",
        )
    others = sum(map(len, kept.values()))
    where = f"{hardware.name} has fp8 units"
    if config.fp8_emulate or hardware.kind == "cpu":
        where = "emulated: asked for" if config.fp8_emulate else "emulated: a CPU has no fp8 units"
    why = _counted(len(sites), len(sites) + others, config.fp8_output_proj)
    choices = [Choice("fp8", config.fp8_format, config.fp8_format, f"{why}; {where}")]
    beside = kept_beside(run)
    asked = {None: "auto", True: "fp8", False: "bf16"}[config.fp8_param_gather]
    choices.append(
        Choice(
            "weights of GEMMs in fp8",
            asked,
            "in 16 bits too" if beside else "in fp8 alone",
            beside or "the optimizer casts them from its main parameters",
        )
    )
    for reason, names in kept.items():
        choices.append(Choice(BESIDE_FP8, "fp8", "bf16", f"{_listed(names)}: {reason}"))
    return Fp8Plan(
        tuple(sites),
        weights,
        tuple(choices),
        head=head_rows * shape.hidden if config.fp8_output_proj else 0,
        copies=kept_casts(run),
        stored=not beside,
        others=others,
        where=where,
    )


def _counted(sites: int, total: int, head: bool) -> str:
    return f"{sites} of {total} GEMMs of the layers{', and the head' if head else ''}"


def _require_matches(patterns: tuple[str, ...], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"--fp8-keep-bf16 {pattern} matches no GEMM.",
                f"the GEMMs of the layers are {_listed(names)}, up to {names[-1]}.",
                "write a shell pattern that matches some of these names, or leave it out.",
            )


def _require_head(rows: int, hidden: int) -> None:
    for what, size, option in (
        ("rows on each rank", rows, "--make-vocab-size-divisible-by"),
        ("columns", hidden, "--hidden-size"),
    ):
        if size % HEAD_MULTIPLE:
            raise ConfigError(
                "--fp8-output-proj cannot be obeyed.",
                f"the head has {size} {what}, and a GEMM in fp8 takes multiples of {HEAD_MULTIPLE}.",
                f"give {option} such a multiple, or leave it out: the layers run in fp8 without it.",
            )


def _require_units(config: PrecisionConfig, hardware: Hardware) -> None:
    capability = hardware.compute_capability
    if hardware.kind == "cuda" and capability is not None and capability < ADA:
        raise ConfigError(
            f"--fp8-format cannot run on {hardware.name}.",
            f"its compute capability is {capability[0]}.{capability[1]}; fp8 units come with 8.9 (Ada).",
            "train in bf16: leave it out.",
        )
    recipe = config.fp8_recipe
    if config.fp8_emulate or (hardware.kind == "cpu" and recipe != "mxfp8"):
        return
    if recipe == "mxfp8" and (capability is None or capability < BLACKWELL):
        raise ConfigError(
            f"--fp8-recipe mxfp8 cannot run on {hardware.name}.",
            "tensor cores scale blocks of 32 from compute capability 10.0 (Blackwell) on.",
            "use --fp8-recipe tensorwise, or add --fp8-emulate, which computes the same numbers slowly.",
        )
    if recipe == "blockwise" and capability is not None and not HOPPER <= capability < BLACKWELL:
        other = "mxfp8 with --fp8-e4m3" if capability >= BLACKWELL else "tensorwise"
        raise ConfigError(
            f"--fp8-recipe blockwise cannot run on {hardware.name}.",
            "cuBLAS scales blocks of 128 on compute capability 9.0 (Hopper) alone.",
            f"use --fp8-recipe {other}, or add --fp8-emulate.",
        )


def _require_e4m3(run: RunConfig, hardware: Hardware) -> None:
    """PyTorch's product of scaled blocks takes E4M3 on both sides; NVIDIA's modules mix formats in mxfp8."""
    config, recipe = run.precision, run.precision.fp8_recipe
    if recipe in MEASURED_WHOLE or config.fp8_emulate or hardware.kind == "cpu":
        return
    if recipe == "mxfp8" and run.kernels.transformer_impl == "transformer_engine":
        return
    if config.fp8_format == "hybrid":
        size = FP8_MULTIPLES[recipe]
        raise ConfigError(
            f"--fp8-recipe {recipe} does not go with --fp8-format hybrid on a GPU.",
            f"its GEMMs with scales of blocks of {size} take E4M3 alone; a block needs no range of E5M2.",
            "use --fp8-e4m3 in place of --fp8 (--fp8-format e4m3), or add --fp8-emulate.",
        )


def _reason(config: PrecisionConfig, shape: ModelShape, name: str, size_out: int, size_in: int) -> str | None:
    """Why a site stays in bf16, or None."""
    layer = int(name.split(".")[1])
    if config.first_last_layers_bf16:
        counts = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
        first, last = (1 if count is None else count for count in counts)
        if layer < first or layer >= shape.num_layers - last:
            return "--first-last-layers-bf16"
    for pattern in config.fp8_keep_bf16:
        if fnmatchcase(name, pattern):
            return f"--fp8-keep-bf16 {pattern}"
    for what, size in (("output", size_out), ("input", size_in)):
        multiple = FP8_MULTIPLES[config.fp8_recipe]
        if size % multiple:
            below = size // multiple * multiple
            near = f"are {below} and {below + multiple}" if below else f"is {multiple}"
            return f"its {what} size {size} is no multiple of {multiple} (the nearest {near})"
    return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
