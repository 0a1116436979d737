"""Run folders made by hand, with a ledger as of one GPU: what the report is tested on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from redline.ledger import (
    LEDGER_FILE,
    METRICS_FILE,
    ModuleRow,
    OperatorRow,
    RankAccount,
    Reference,
    Spread,
    StepAccount,
    write_account,
)
from redline.ledger.causes import make_losses

PEAK, BANDWIDTH = 989.4e12, 4.8e12
WALL_MS, IDEAL_MS = 800.0, 440.0
# Cause -> milliseconds; with the ideal time they are the whole step.
LOST_MS = {
    "gemm": 130.0,
    "attention": 60.0,
    "norm": 22.0,
    "activation": 18.0,
    "loss": 14.0,
    "optimizer": 26.0,
    "cast": 6.0,
    "other": 4.0,
    "dp": 24.0,
    "recompute": 30.0,
    "allocator": 2.0,
    "launch": 12.0,
    "synchronisation": 5.0,
    "data": 3.0,
    "unknown": 4.0,
}
# name, kind, phase, role, calls, ms, FLOPs, bytes
OPERATORS = (
    ("aten::mm", "gemm", "forward", "fprop", 132, 172.0, 1.19e14, 5.1e10),
    ("aten::mm", "gemm", "backward", "dgrad", 132, 176.0, 1.19e14, 5.1e10),
    ("aten::addmm", "gemm", "backward", "wgrad", 132, 200.0, 1.19e14, 1.1e11),
    ("flash_attn::bwd", "attention", "backward", "", 32, 96.0, 4.4e13, 2.6e10),
    ("flash_attn::fwd", "attention", "forward", "", 32, 44.0, 1.8e13, 1.1e10),
    ("redline::adamw", "optimizer", "optimizer", "", 1, 26.0, 2.7e10, 8.9e10),
    ("redline::rms_norm_bwd", "norm", "backward", "", 68, 12.6, 1.2e10, 3.8e10),
    ("redline::swiglu_bwd", "activation", "backward", "", 32, 10.2, 1.9e10, 4.1e10),
    ("redline::linear_cross_entropy", "loss", "forward", "", 4, 14.0, 3.9e9, 1.7e10),
    ("redline::swiglu", "activation", "forward", "", 32, 7.8, 9.4e9, 2.8e10),
    ("redline::rms_norm", "norm", "forward", "", 68, 9.4, 6.4e9, 2.4e10),
    ("aten::copy_", "copy", "backward", "", 96, 6.0, None, 1.9e10),
    ("aten::embedding", "other", "forward", "", 4, 1.1, None, 2.1e9),
)
COLUMNS = ("phase", "layer", "module", "calls", "ms", "flops")
MODULES = (
    ("forward", 0, "mlp", 4, 60.0, 6e13),
    ("forward", 1, "mlp", 4, 61.0, 6e13),
    ("backward", 0, "mlp", 4, 130.0, 12e13),
    ("forward", None, "head", 4, 44.0, 4e13),
    ("optimizer", None, "", 1, 26.0, None),
)
CHOICES = [
    {"what": "attention-backend", "asked": "auto", "ran": "fused", "why": "the fastest of those measured"},
    {"what": "precision", "asked": "bf16", "ran": "bf16", "why": "as asked"},
    {"what": "transformer-impl", "asked": "fused", "ran": "local", "why": "Triton is not installed"},
]


def make_run(folder: Path, *, steps: int = 60, ranks: int = 1, rate: float = 36_000.0, **parts: Any) -> Path:
    """A folder with everything in it.

    Args:
        rate: tokens/s of a device.
        parts: `summary` (values added to it), `options` (TOML text), `ledger` (an account): False leaves that
            file out; `records`: step -> further keys of its record.
    """
    folder.mkdir(parents=True)
    records = [_step(number, rate, ranks, parts.get("records")) for number in range(1, steps + 1)]
    for number in range(20, steps + 1, 20):
        loss = 2.2 + 6 * math.exp(-number / 15)
        records.append(
            {"kind": "valid", "split": "valid", "step": number, "loss": loss, "tokens": 1, "time_s": 1}
        )
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / METRICS_FILE).write_text(lines)
    if parts.get("summary") is not False:
        document = summary_of(folder, steps, ranks, rate) | (parts.get("summary") or {})
        (folder / "summary.json").write_text(json.dumps(document))
    options = parts.get("options", OPTIONS)
    if options is not False:
        (folder / "config.toml").write_text(options)
    if parts.get("ledger") is not False:
        write_account(folder / LEDGER_FILE, parts.get("ledger") or account_of(ranks))
    return folder


OPTIONS = (
    "[model]\nnum_layers = 8\nhidden_size = 4096\nnum_attention_heads = 32\nffn_hidden_size = 14336\n"
    'vocab_size = 128256\nactivation_func = "swiglu"\n[train]\nseq_length = 8192\nmicro_batch_size = 1\n'
    "global_batch_size = 4\n[precision]\nbf16 = true\n[checkpoint]\nsave_interval = 25\n"
)


def _step(number: int, rate: float, ranks: int, more: Any) -> dict[str, Any]:
    step = {
        "kind": "step",
        "step": number,
        "loss": 2.0 + 6 * math.exp(-number / 15) + 0.05 * math.sin(3.0 * number),
        "lr": 3e-4 * min(1.0, number / 10),
        "grad_norm": 0.8 + 3 * math.exp(-number / 8),
        "tokens_per_s": ranks * (rate / 3 if number == 1 else rate + 40.0 * math.sin(number)),
        "step_time_s": 32_768 / rate,
        "mfu": 0.55 * rate / 36_000.0,
        "flops_per_s": 0.55 * PEAK,
        "memory": 71 << 30,
        "memory_now": (60 << 30) + number * (1 << 20),
        "consumed_samples": 4 * number,
        "global_batch_size": 4,
        "loss_scale": 1.0,
        "skipped": number == 7,
        "nonfinite": None,
        "profiled": number in (11, 12),
    }
    return step | (more(number) if more else {})


def summary_of(folder: Path, steps: int, ranks: int, rate: float) -> dict[str, Any]:
    """summary.json as a run writes it."""
    shares = {"causal-half": 0.55 * rate / 36_000.0, "full": 0.58 * rate / 36_000.0}
    utilisation = {
        name: {
            "mfu": share,
            "flops_per_s": share * PEAK,
            "peak_flops_per_s": PEAK,
            "convention": name,
            "dtype": "bf16",
            "peak_source": "NVIDIA's data sheet",
        }
        for name, share in shares.items()
    }
    parts = {
        "weights": 5_600 << 20,
        "main_params": 11_200 << 20,
        "main_grads": 11_200 << 20,
        "exp_avg": 11_200 << 20,
        "exp_avg_sq": 11_200 << 20,
        "activations_attention": 9_000 << 20,
        "activations_mlp": 8_600 << 20,
        "workspace_loss": 3_000 << 20,
    }
    return {
        "name": folder.name,
        "outcome": "finished",
        "steps": steps,
        "consumed_samples": 4 * steps,
        "consumed_tokens": 32_768 * steps,
        "wall_time_s": 60.0,
        "parameters": 2_795_000_000,
        "world_size": ranks,
        "hardware": {
            "name": "NVIDIA H200",
            "kind": "cuda",
            "memory_bytes": 141 << 30,
            "num_devices": ranks,
            "peak_flops": {"bf16": PEAK},
            "peak_source": "NVIDIA's data sheet",
        },
        "tokens_per_s": rate * ranks,
        "step_time_s": 32_768 / rate,
        "predicted_memory": {
            "total": sum(parts.values()),
            "peak_at": "loss",
            "parts": parts,
            "saved": {"attention.core": 4 << 30, "mlp.fc2": 2 << 30},
        },
        "measured_memory_bytes": 71 << 30,
        "measured_memory": {
            "weights": 6 << 30,
            "main_params": 11 << 30,
            "main_grads": 11 << 30,
            "exp_avg": 11 << 30,
            "exp_avg_sq": 11 << 30,
            "activations_and_workspace": 21 << 30,
            "kept_in_reserve": 2 << 30,
        },
        "measured_activations": {
            "by_module": {"attention.core": 4 << 30, "mlp.fc2": 3 << 30},
            "unknown": None,
        },
        "memory_measure": "peak allocated by PyTorch on the GPU",
        "train_loss": 2.125,
        "valid_loss": 2.3125,
        "unigram_loss": 7.4375,
        "skipped_steps": 1,
        "choices": CHOICES,
        "files": {"metrics": str(folder / METRICS_FILE)},
        "versions": {"redline": "0.1.0", "torch": "2.11.0"},
        "mfu": utilisation,
        "data": [{"split": "train", "name": "corpus", "weight": 1.0, "epochs": 0.25}],
    }


def account_of(ranks: int = 1, **reference: Any) -> StepAccount:
    """An account that adds up, of a step on a GPU, or with another reference."""
    limits = {
        "peak_flops_per_s": PEAK,
        "bandwidth_bytes_per_s": BANDWIDTH,
        "peak_source": "NVIDIA's data sheet",
    }
    step = {"model_flops": IDEAL_MS / 1e3 * PEAK, "step_ms": 795.0, "flops_source": "model"}
    known = Reference(device="NVIDIA H200", kind="cuda", dtype="bf16", **(limits | step | reference))
    ideal = IDEAL_MS if known.peak_flops_per_s else None
    lost = LOST_MS if ideal else LOST_MS | {"gemm": LOST_MS["gemm"] + IDEAL_MS}
    losses = make_losses(lost, WALL_MS, ideal_known=ideal is not None)
    mfu = None if ideal is None else ideal / WALL_MS
    whole = RankAccount(rank=0, wall_ms=WALL_MS, ideal_ms=ideal, mfu=mfu, losses=losses, source="trace.json")
    apart = (Spread(key="dp", mean_ms=24.0, worst_ms=36.0, worst_rank=1, skew=0.5),) if ranks > 1 else ()
    return StepAccount(
        reference=known,
        steps=(11, 12),
        wall_ms=WALL_MS,
        ideal_ms=ideal,
        mfu=mfu,
        losses=losses,
        operators=tuple(_operator(known, *each) for each in OPERATORS),
        modules=tuple(ModuleRow(**dict(zip(COLUMNS, each, strict=True))) for each in MODULES),
        ranks=(whole,) * ranks,
        spread=apart,
        overhead=0.0063,
    )


def _operator(
    known: Reference, name: str, kind: str, phase: str, role: str, calls: float, ms: float,
    flops: float | None, num_bytes: float,
) -> OperatorRow:  # fmt: skip
    rate = None if flops is None else flops / ms * 1e3
    flow = num_bytes / ms * 1e3
    peak, bandwidth = known.peak_flops_per_s, known.bandwidth_bytes_per_s
    return OperatorRow(
        name=name,
        kind=kind,
        phase=phase,
        role=role,
        calls=calls,
        ms=ms,
        flops=flops,
        bytes=num_bytes,
        flops_per_s=rate,
        bytes_per_s=flow,
        of_peak=rate / peak if rate and peak else None,
        of_bandwidth=flow / bandwidth if bandwidth else None,
        limit="",
    )
