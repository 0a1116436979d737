"""A launch script in which every check is content, and how to spoil it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from redline.config.launch import read_launch
from redline.doctor import Case
from redline.hardware import hardware_named
from redline.plan.cost_setup import Dialect

# Llama-3-70B on 64 H100: each flag with its words, None for a switch.
GOOD: dict[str, str | None] = {
    "--num-layers": "80",
    "--hidden-size": "8192",
    "--ffn-hidden-size": "28672",
    "--num-attention-heads": "64",
    "--group-query-attention": None,
    "--num-query-groups": "8",
    "--seq-length": "8192",
    "--max-position-embeddings": "8192",
    "--vocab-size": "128256",
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": None,
    "--disable-bias-linear": None,
    "--untie-embeddings-and-output-weights": None,
    "--hidden-dropout": "0.0",
    "--attention-dropout": "0.0",
    "--micro-batch-size": "1",
    "--global-batch-size": "512",
    "--train-iters": "1000",
    "--lr": "1e-4",
    "--bf16": None,
    "--fp8-format": "hybrid",
    "--fp8-recipe": "tensorwise",
    "--first-last-layers-bf16": None,
    "--fp8-param-gather": None,
    "--grad-reduce-in-bf16": None,
    "--tensor-model-parallel-size": "4",
    "--pipeline-model-parallel-size": "4",
    "--num-layers-per-virtual-pipeline-stage": "4",
    "--sequence-parallel": None,
    "--tp-comm-overlap": None,
    "--use-distributed-optimizer": None,
    "--overlap-grad-reduce": None,
    "--overlap-param-gather": None,
    "--cross-entropy-loss-fusion": None,
    "--manual-gc": None,
    "--manual-gc-interval": "100",
    "--rerun-mode": "disabled",
    "--log-interval": "10",
    "--log-throughput": None,
    "--save": "/checkpoints",
    "--save-interval": "2000",
    "--async-save": None,
    "--eval-iters": "10",
    "--eval-interval": "1000",
    "--num-workers": "4",
}
VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def script(
    change: Mapping[str, str | None] | None = None,
    without: tuple[str, ...] = (),
    env: Mapping[str, str | None] | None = None,
) -> str:
    """The script with flags added or changed, taken out, and variables set (None: not exported)."""
    flags = {flag: words for flag, words in {**GOOD, **(change or {})}.items() if flag not in without}
    variables = {name: value for name, value in {**VARIABLES, **(env or {})}.items() if value is not None}
    lines = ["#!/bin/bash", *(f"export {name}={value}" for name, value in variables.items()), "ARGS=("]
    lines += [f"  {flag}" + (f" {words}" if words is not None else "") for flag, words in flags.items()]
    return "\n".join([*lines, ")", 'torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py "${ARGS[@]}"', ""])


def case_of(
    folder: Path,
    text: str,
    *,
    gpu: str | None = "h100",
    gpus: int | None = 64,
    dialect: Dialect = "megatron",
    name: str = "run.sh",
    **more: object,
) -> Case:
    """The case of a script on so many devices."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    launch = read_launch(path)
    environment = {name: value for name, (value, _) in launch.environment.items()}
    hardware = hardware_named(gpu) if gpu else None
    return Case(
        launch=launch,
        dialect=dialect,
        world_size=gpus,
        hardware=hardware,
        environment=environment,
        **more,  # type: ignore[arg-type]
    )
