"""One configuration trained several ways in one run: eager, compiled, plain, fused, packed, dense."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redline.bench.record import Keep
from redline.bench.step import bench_step
from redline.config import Environment, parse_args
from redline.data import IndexedWriter
from redline.errors import ConfigError, RedlineError, UsageError

LOCAL, FUSED = ("--transformer-impl", "local"), ("--transformer-impl", "fused")
COMPILED = ("--use-torch-compile",)
# One step before the recording: it must be over when measuring begins.
GRAPH = ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1")
IMPLEMENTATIONS = {
    "eager local": LOCAL,
    "eager fused": FUSED,
    "compiled local": (*LOCAL, *COMPILED),
    "compiled fused": (*FUSED, *COMPILED),
    "compiled fused, CUDA graph": (*FUSED, *COMPILED, *GRAPH),
}
# The layers' operators and the loss: embedding and optimizer are Redline's in the first two rows.
UNFUSED = (
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-masked-softmax-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
    "--no-cross-entropy-loss-fusion",
)
OPERATORS = {
    "plain operators": (*FUSED, *UNFUSED),
    "fused operators": FUSED,
    "fused operators, plain embedding": (*FUSED, "--no-embedding-fusion"),
    "fused operators, plain optimizer": (*FUSED, "--no-adamw-fusion", "--no-grad-norm-fusion"),
    "fused operators, residual in the norm": (*FUSED, "--fused-residual-rmsnorm"),
}
# Documents as they are: many short ones, few long ones.
MEAN_LENGTH, MAX_LENGTH, SIGMA, NUM_DOCUMENTS, VOCAB = 700, 8192, 1.2, 6000, 100

Say = Callable[[str], object]


def compare_implementations(
    words: Sequence[str], environment: Environment, *, steps: int, say: Say, keep: Keep
) -> list[dict[str, Any]]:
    """The same configuration by every implementation; `ratio` is the rate over that of the first row.

    Args:
        words: flags of `redline train`.
        keep: gets all rows so far after each one.
    """
    return _rows(words, IMPLEMENTATIONS, environment, steps, say, keep)


def compare_operators(
    words: Sequence[str], environment: Environment, *, steps: int, say: Say, keep: Keep
) -> list[dict[str, Any]]:
    """The same configuration with plain operators and with fused ones; attention and GEMMs alike.

    Embedding and optimizer are plain in a row of their own; the residual addition is joined to the norm where
    that is RMSNorm. Arguments as of `compare_implementations`.

    Raises: UsageError where no fused operator can run.
    """
    normalization = parse_args(words).config.model.normalization
    variants = {
        variant: flags
        for variant, flags in OPERATORS.items()
        if normalization == "RMSNorm" or "--fused-residual-rmsnorm" not in flags
    }
    try:
        return _rows(words, variants, environment, steps, say, keep, needed=FUSED)
    except ConfigError as error:
        raise UsageError(
            "--operators compares fused operators, and none can run here.",
            error.why,
            "run it where there is an NVIDIA GPU, Triton, and bf16, fp16 or fp32 to compute in; "
            "without --operators the step alone is measured.",
        ) from error


def compare_packing(
    words: Sequence[str], environment: Environment, *, steps: int, say: Say, keep: Keep
) -> list[dict[str, Any]]:
    """Skewed documents, packed, beside samples that are one document each: as many places, no padding.

    `ratio` compares real tokens a second, `flops_ratio` model FLOPs a second: packed documents have less
    attention to compute.

    Args:
        words: flags of `redline train` that name no data; the model has more than VOCAB tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "skewed"
        _write_skewed(prefix)
        data = ("--data-path", str(prefix), "--split", "1,0,0")
        variants = {"dense": ("--mock-data",), "packed": (*data, "--packing")}
        return _rows(words, variants, environment, steps, say, keep)


def _rows(
    words: Sequence[str],
    variants: Mapping[str, Sequence[str]],
    environment: Environment,
    steps: int,
    say: Say,
    keep: Keep,
    needed: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Each way in turn, the words and its own flags, with the rates over those of the first that ran.

    Raises: ConfigError where the flags `needed`, which every way has, cannot be obeyed.
    """
    rows: list[dict[str, Any]] = []
    for variant, flags in variants.items():
        row = {"variant": variant, "flags": [*words, *flags]}
        rows.append(row | _measured(variant, words, flags, environment, steps, say, needed))
        keep(_with_ratios(rows))
    return rows


def _measured(
    variant: str,
    words: Sequence[str],
    flags: Sequence[str],
    environment: Environment,
    steps: int,
    say: Say,
    needed: Sequence[str],
) -> dict[str, Any]:
    """One way; one that fails does not cost the others their figures."""
    say(f"{variant}:")
    try:
        row = bench_step(parse_args([*words, *flags]), environment, steps=steps, say=say)
    except (RedlineError, RuntimeError) as error:
        if needed and isinstance(error, ConfigError) and error.what.startswith(" ".join(needed)):
            raise
        row = {"error": _said(error, flags)}
    # The next one starts with an empty device and compiles for itself.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    return row


def _said(error: Exception, flags: Sequence[str]) -> str:
    """The error; without its mend where that would have the user change a flag that only the variant gave."""
    if isinstance(error, ConfigError) and error.what.split(" ")[0] in flags:
        return str(ConfigError(error.what, error.why))
    return str(error)


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rates over those of the first row that has them."""
    measured = [row for row in rows if "error" not in row]
    for row in measured:
        row["ratio"] = row["tokens_per_s"] / measured[0]["tokens_per_s"]
        row["flops_ratio"] = _flops_per_s(row) / _flops_per_s(measured[0])
    return rows


def _flops_per_s(row: dict[str, Any]) -> float:
    rate: float = row["mfu"]["causal-half"]["flops_per_s"]
    return rate


def _write_skewed(prefix: Path) -> None:
    random = np.random.default_rng(0)
    centre = np.log(MEAN_LENGTH) - SIGMA**2 / 2
    lengths = np.clip(random.lognormal(centre, SIGMA, NUM_DOCUMENTS), 2, MAX_LENGTH).astype(int)
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        for length in lengths.tolist():
            writer.add_document(random.integers(1, VOCAB, length).tolist())
