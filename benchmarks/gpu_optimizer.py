"""Optimizer states on one GPU: what storage in fewer bits and in host memory cost a step, and save.

    python benchmarks/gpu_optimizer.py steps|whole OUT.json

`steps`: llama3.2-1b, 4 microbatches a step, one case after the other; between two runs of the first, as cards
grow slower warm. `whole`: the 8B model, states in host memory. The time that a plan foresees for the way
stands beside what the step took longer. (That states in host memory change no bit is tested: cuDNN's
attention alone makes the losses of two such runs differ.) OUT.json grows by a record a case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from gpu_memory import ONE, STORAGE, measure

from redline.bench.record import provenance

OFFLOAD = "--optimizer-cpu-offload"
CODED = STORAGE.replace("bf16", "fp8")
EIGHT_WHOLE = "--preset llama3-8b --seq-length 8192"
STEP = f"{ONE} --seq-length 4096 --micro-batch-size 2 --global-batch-size 8"
STAGES = {
    "steps": [
        f"{STEP} {flags}".rstrip()
        for flags in (
            "", OFFLOAD, f"{OFFLOAD} --no-overlap-cpu-optimizer-d2h-h2d",
            f"{OFFLOAD} --optimizer-offload-fraction 0.5", STORAGE, CODED, f"{CODED} {OFFLOAD}", "",
        )
    ],
    "whole": [f"{EIGHT_WHOLE} --global-batch-size 8 {flags}" for flags in (f"{CODED} {OFFLOAD}", OFFLOAD)],
}  # fmt: skip


def main() -> None:
    """Run a stage, and print a line a case."""
    stage, out = sys.argv[1:]
    found: list[dict[str, Any]] = []
    print("| flags | step s | longer s | foreseen | peak GiB | predicted |", flush=True)
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for words in STAGES[stage]:
        found.append(record := measure(words, steps=4, warmup=2))
        about = {"case": f"optimizer-{stage}", **provenance("cuda", os.environ.get("COMMIT"))}
        Path(out).write_text(json.dumps({**about, "cases": found}))
        flags = words.removeprefix(STEP).removeprefix(EIGHT_WHOLE).strip() or "(none)"
        if "failed" in record:
            print(f"| {flags} | {record['failed']} |", flush=True)
            continue
        first = next(each for each in found if "failed" not in each)
        foreseen = [each.rsplit("about ", 1)[1] for each in record["choices"] if "optimizer-offload" in each]
        gib = [record[name] / 2**30 for name in ("measured", "predicted")]
        print(
            f"| {flags} | {record['step_s']:.3f} | {record['step_s'] - first['step_s']:+.3f} | "
            f"{foreseen[0] if foreseen else ''} | {gib[0]:.2f} | {gib[1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
