"""What each storage of optimizer states costs in loss: the same run under each, on any device.

    python benchmarks/storage_convergence.py OUT.json [flags of redline train]

Without flags: a small Llama on the text of the standard library. Prints a table of bytes a parameter, the
mean training loss of the last tenth of the steps, and its difference to fp32 states.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from redline.config import parse_args, read_environment
from redline.formulas.state import bytes_per_parameter
from redline.run import open_run

SMALL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --seq-length 128 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16 --lr 1e-3 "
    "--adam-beta2 0.95 --lr-warmup-iters 20 --lr-decay-style cosine --min-lr 1e-4 --micro-batch-size 8 "
    "--global-batch-size 16 --train-iters 300 --eval-iters 0 --num-workers 0 --hidden-dropout 0 "
    "--attention-dropout 0"
)
AWARE = "--use-precision-aware-optimizer"
STORAGES = {
    "fp32 states": "",
    "bf16 + 16 bits": AWARE,
    "and bf16 first moment": f"{AWARE} --exp-avg-dtype bf16",
    "and bf16 moments": f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "and bf16 gradients": f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
}
SEEDS = (1, 2)


def losses(words: str) -> tuple[list[float], float]:
    """(the loss of every step, bytes a parameter)."""
    run = open_run(parse_args(words.split()), read_environment(), lambda _: None)
    step = run.make_step()
    with closing(run.batches()) as batches:
        found = [step(next(batches)).loss for _ in range(run.plan.batch.total_iterations)]
    return found, bytes_per_parameter(run.plan.dtypes)


def main() -> None:
    """Run every storage with every seed, and print the table."""
    out, base = Path(sys.argv[1]), " ".join(sys.argv[2:]) or SMALL
    records, reference = [], 0.0
    print("| storage | bytes each | loss | difference | spread of seeds |\n| --- | --- | --- | --- | --- |")
    for name, flags in STORAGES.items():
        ends = []
        for seed in SEEDS:
            found, size = losses(f"{base} --seed {seed} {flags}")
            tail = found[-max(1, len(found) // 10) :]
            ends.append(sum(tail) / len(tail))
            records.append({"storage": name, "seed": seed, "flags": flags, "bytes": size, "losses": found})
        out.write_text(json.dumps(records))
        loss = sum(ends) / len(ends)
        reference = reference or loss
        spread = max(ends) - min(ends)
        print(f"| {name} | {size:.0f} | {loss:.4f} | {loss - reference:+.4f} | {spread:.4f} |", flush=True)


if __name__ == "__main__":
    main()
