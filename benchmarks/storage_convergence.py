"""What each storage of optimizer states costs in loss: the same run under each, on any device.

    python benchmarks/storage_convergence.py OUT.json [storage ...] [--flags of redline train]

A small Llama on the text of the standard library, larger on a GPU; a storage that is not named is not run,
and no name runs all. Data and initial weights are the same in all runs but those of the second seed. On a GPU
a step has 64k tokens: with 8k, two runs of one seed differed by 3 % of the loss. Prints a table of bytes a
parameter, the mean training loss of the last tenth of the steps, and its difference to the first storage;
OUT.json grows by a record a run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from redline.bench.record import provenance
from redline.config import parse_args, read_environment
from redline.formulas.state import bytes_per_parameter
from redline.run import open_run

MODEL = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16 --lr 1e-3 "
    "--adam-beta2 0.95 --lr-warmup-iters 20 --lr-decay-style cosine --min-lr 1e-4 --eval-iters 0 "
    "--num-workers 0 --hidden-dropout 0 --attention-dropout 0"
)
SIZES = {
    "cpu": "--num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 16 --train-iters 300",
    "cuda": "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 "
    "--seq-length 512 --micro-batch-size 128 --train-iters 400",
}
AWARE = "--use-precision-aware-optimizer"
MOMENTS = f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
CODED = f"{AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
STORAGES = {
    "fp32": "",
    "fp32-seed2": "--seed 2",
    "remainder": AWARE,
    "bf16-first": f"{AWARE} --exp-avg-dtype bf16",
    "bf16-moments": MOMENTS,
    "bf16-moments-grads": f"{MOMENTS} --main-grads-dtype bf16",
    "8-bit-first": f"{AWARE} --exp-avg-dtype fp8",
    "8-bit-moments": CODED,
    "8-bit-moments-grads": f"{CODED} --main-grads-dtype bf16",
}


def trained(words: str) -> dict[str, Any]:
    """The loss, averaged over each tenth of the steps; bytes a parameter; seconds."""
    run = open_run(parse_args(words.split()), read_environment(), lambda _: None)
    step, started = run.make_step(), time.perf_counter()
    with closing(run.batches()) as batches:
        losses = [step(next(batches)).loss for _ in range(run.plan.batch.total_iterations)]
    seconds, tenth = time.perf_counter() - started, len(losses) // 10
    curve = [sum(losses[place : place + tenth]) / tenth for place in range(0, 10 * tenth, tenth)]
    each = bytes_per_parameter(run.plan.dtypes)
    return {"bytes": each, "seconds": seconds, "loss": curve[-1], "curve": curve}


def main() -> None:
    """Run the storages, and print the table."""
    out, *words = sys.argv[1:]
    first_flag = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    names, flags = words[:first_flag] or list(STORAGES), words[first_flag:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = f"{MODEL} {SIZES[device]} --seed 1 {' '.join(flags)}"
    about = provenance(device, os.environ.get("COMMIT"))
    record: dict[str, Any] = {"case": "storage-convergence", **about, "flags": base, "runs": {}}
    print("| storage | bytes each | loss | difference | s |\n| --- | --- | --- | --- | --- |", flush=True)
    reference = None
    for name in names:
        record["runs"][name] = found = {"flags": STORAGES[name], **trained(f"{base} {STORAGES[name]}")}
        Path(out).write_text(json.dumps(record))
        loss = found["loss"]
        reference = loss if reference is None else reference
        each, took = found["bytes"], found["seconds"]
        print(f"| {name} | {each:.4g} | {loss:.4f} | {loss - reference:+.4f} | {took:.0f} |", flush=True)


if __name__ == "__main__":
    main()
