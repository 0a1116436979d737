"""Tensor parallelism on the GPUs of one machine: equality with one GPU, then whole steps by overlap.

Run by torchrun, a process a GPU; benchmarks/gpu_tp.sh does. The first rank prints and writes.

    tp_steps.py equality                   every overlap beside one GPU, in fp64 and in fused fp32
    tp_steps.py steps {8b,1b}              tokens/s of the 8-layer 8B shape, or of the 1B, by overlap
    tp_steps.py symmetric {equality,8b,1b} the same by symmetric memory, one run a process; TP_AUTO=1: auto
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from redline.bench import bench_step
from redline.comm import close_world
from redline.config import Environment, parse_args, read_environment
from redline.data import samples
from tests.integration import layouts

RANKS = read_environment().world_size
SP = {"tensor_model_parallel_size": RANKS, "sequence_parallel": True}
OVERLAP = {**SP, "tp_comm_overlap": True}
CHUNKED = {**OVERLAP, "tp_comm_overlap_method": "chunked"}
SYMMETRIC = {**OVERLAP, "tp_comm_overlap_method": "symmetric"}
OPEN = "--tp-comm-overlap-method plain --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad"
MODELS = {"8b": "--preset llama3-8b --num-layers 8", "1b": "--preset llama3.2-1b"}
TRAIN = (
    "--seq-length 8192 --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 20 "
    f"--eval-iters 0 --bf16 --tensor-model-parallel-size {RANKS}"
)
STEPS = {
    "tp": "",
    "sp": "--sequence-parallel",
    "sp, all in the open": f"--sequence-parallel --tp-comm-overlap {OPEN}",
    **{
        f"sp, chunked {n}": f"--sequence-parallel --tp-comm-overlap --tp-comm-overlap-method chunked "
        f"--tp-comm-overlap-chunks {n}"
        for n in (2, 4, 8)
    },
}


def attempts() -> Iterator[Environment]:
    """The environment of each further run in these processes: they meet anew, in the launcher's store."""
    here = read_environment()
    for number in range(10**6):
        yield replace(here, attempt=1000 + number, agent_store=True)


def equality(methods: Mapping[str, Mapping[str, Any]], environments: Iterator[Environment]) -> dict[str, Any]:
    """The largest difference of losses, in fp64 with plain operators and in fp32 with the kernels."""
    samples.MOCK_DOCUMENTS = 500  # as in the tests: the index of short samples is long
    found = {}
    for model, precision, tolerance in (
        (layouts.GPT, {}, 1e-10),
        (layouts.LLAMA, {}, 1e-10),
        (layouts.LLAMA, {"fp64": False, "fp32": True, "train_iters": 3}, 2e-5),
    ):
        values = {**model, **precision, "device": "cuda"}
        alone = layouts.train(values, Environment(cache_dir=read_environment().cache_dir))
        for name, method in methods.items():
            seen = layouts.train({**values, **method}, next(environments))
            close_world()
            worst = max(abs(a / b - 1) for a, b in zip(seen.losses, alone.losses, strict=True))
            kind = values.get("position_embedding_type", "gpt")
            case = f"{kind}, {'fp32 fused' if precision else 'fp64'}, {name}"
            found[case] = {"largest relative difference": worst, "equal": worst <= tolerance}
            say(f"{case}: {worst:.1e} {'equal' if worst <= tolerance else 'DIFFERENT'}")
    return found


def steps(model: str, variants: Mapping[str, str], environments: Iterator[Environment]) -> dict[str, Any]:
    """Tokens a second of each variant."""
    found: dict[str, Any] = {}
    for name, flags in variants.items():
        try:
            parsed = parse_args(f"{MODELS[model]} {TRAIN} {flags}".split())
            row = bench_step(parsed, next(environments), steps=6, say=lambda _: None)
        except Exception as error:  # the others are worth measuring all the same
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            say(f"{model}, {name}: {found[name]['error']}")
            continue
        finally:
            close_world()
            gc.collect()
            torch.cuda.empty_cache()
        choices = [each for each in row["choices"] if each["what"].startswith("tp-comm")]
        keep = ("tokens_per_s", "tokens_per_s_range", "step_time_s", "peak_memory_bytes", "loss")
        found[name] = {key: row[key] for key in keep} | {
            "mfu": row["mfu"]["causal-half"]["mfu"],
            "predicted_memory_bytes": row["predicted_memory"]["total"],
            "choices": choices,
        }
        gib = (row["peak_memory_bytes"] or 0) / 2**30
        rate, mfu = row["tokens_per_s"], found[name]["mfu"]
        say(f"{model}, {name}: {rate:,.0f} tokens/s, MFU {mfu:.1%}, {gib:.1f} GiB")
        for choice in choices:
            say(f"    {choice['what']}: {choice['ran']}: {choice['why']}")
    return found


def say(line: str) -> None:
    if read_environment().rank == 0:
        print(line, flush=True)


def main(what: str, which: str = "") -> None:
    environments = attempts()
    if what == "equality":
        found = equality(
            {"tp": {**SP, "sequence_parallel": False}, "sp": SP, "chunked": CHUNKED, "rs-dgrad":
             {**CHUNKED, "tp_comm_overlap_rs_dgrad": True}}, environments,
        )  # fmt: skip
    elif what == "steps":
        found = steps(which, STEPS, environments)
    elif which == "equality":
        found = equality({"symmetric": SYMMETRIC}, environments)
    else:
        flags = {"sp, auto": "--sequence-parallel --tp-comm-overlap"}
        symmetric = "--sequence-parallel --tp-comm-overlap --tp-comm-overlap-method symmetric"
        found = steps(
            which, flags if os.environ.get("TP_AUTO") else {"sp, symmetric": symmetric}, environments
        )
    if read_environment().rank == 0:
        out = Path(os.environ.get("OUT", "bench-out"))
        out.mkdir(parents=True, exist_ok=True)
        name = f"tp-{what}-{which or 'all'}{'-auto' if os.environ.get('TP_AUTO') else ''}.json"
        record = {"case": f"tp {what} {which}".strip(), "ranks": RANKS, "torch": torch.__version__,
                  "card": torch.cuda.get_device_name(), "commit": os.environ.get("COMMIT", "unknown"),
                  "found": found}  # fmt: skip
        (out / name).write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
