"""Data parallelism on the GPUs of one host: see gpu_parallel.sh.

equal   losses of the same run on one GPU and on several, by layout (under torchrun, all in one start)
steps   tokens/s and memory of the 1B and the 8-layer 8B model, by layout and bucket size (the same)
kill    a rank is killed under load: how long until the job has ended, what it says, and whether it resumes
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from redline.bench import bench_step
from redline.bench.record import write_result
from redline.comm import close_world
from redline.config import Environment, parse_args, read_environment
from redline.errors import RedlineError
from redline.run import open_run

Row = dict[str, Any]
SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 4096 --seq-length 512 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --eval-iters 0"
)
SHARDED = "--use-distributed-optimizer"
LATE = "--no-overlap-grad-reduce"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
EQUAL = [
    ("plain", "--fp32", ""),
    ("sharded, late", "--fp32", f"{SHARDED} {LATE} --no-overlap-param-gather"),
    ("sharded", "--fp32", SHARDED),
    ("tp", "--fp32", TP),
    ("sharded", "--bf16", SHARDED),
    ("tp", "--bf16", TP),
]
LARGE_BUCKETS = f"{SHARDED} --ddp-bucket-size 160000000"
STEPS = {
    "--preset llama3.2-1b --seq-length 4096 --micro-batch-size 2": {
        "plain": "", "sharded": SHARDED, "tp": TP,
        "sharded, late": f"{SHARDED} {LATE} --no-overlap-param-gather",
    },
    "--preset llama3-8b --num-layers 8 --seq-length 4096 --micro-batch-size 1": {
        "sharded": SHARDED, "sharded, 160 million elements": LARGE_BUCKETS
    },
}  # fmt: skip
NUM_STEPS = 5


class Job:
    """The ranks of one start, which meet anew for each layout."""

    def __init__(self, out: Path, case: str) -> None:
        self.environment, self._out, self._case = read_environment(), out, case
        self.leads = self.environment.rank == 0
        self.size = self.environment.world_size
        self._attempts = count(self.environment.attempt * 1000 + (500 if case == "steps" else 0))
        self._rows: list[Row] = []

    def on_all(self, work: Callable[[Environment], Any]) -> Any:
        """What this rank finds where all of them work together."""
        return self._cleanly(work, replace(self.environment, attempt=next(self._attempts)))

    def on_one(self, work: Callable[[Environment], Any]) -> Any:
        """What the first rank finds alone; None on the others, which go on and wait where they next meet."""
        alone = replace(self.environment, world_size=1, local_world_size=1)
        return self._cleanly(work, alone) if self.leads else None

    def add(self, row: Row) -> None:
        """Keep a row at once: whatever follows may be cut off."""
        self._rows.append(row)
        if self.leads:
            print(
                {key: value for key, value in row.items() if not isinstance(value, dict | list)}, flush=True
            )
            write_result(self._out, f"parallel-{self._case}", "cuda", self._rows)

    @staticmethod
    def _cleanly(work: Callable[[Environment], Any], environment: Environment) -> Any:
        try:
            return work(environment)
        finally:
            close_world()
            gc.collect()
            torch.cuda.empty_cache()


def losses(words: str) -> Callable[[Environment], list[float]]:
    """The losses of a run of these words."""

    def work(environment: Environment) -> list[float]:
        run = open_run(parse_args(words.split()), environment, lambda _: None)
        step = run.make_step()
        with closing(run.batches()) as batches:
            found = [step(next(batches)).loss for _ in range(run.plan.batch.total_iterations)]
        run.state.optimizer.settle()
        return found

    return work


def equal(job: Job) -> None:
    alone: dict[str, list[float]] = {}
    for name, precision, words in EQUAL:
        if precision not in alone:
            alone[precision] = job.on_one(losses(f"{SMALL} {precision}")) or []
        started = time.monotonic()
        row: Row = {"layout": name, "precision": precision[2:], "gpus": job.size}
        found = job.on_all(losses(f"{SMALL} {precision} {words}"))
        if job.leads:
            pairs = list(zip(alone[precision], found, strict=True))
            row |= {"first": abs(pairs[0][1] / pairs[0][0] - 1), "s": time.monotonic() - started}
            row["largest"] = max(abs(b / a - 1) for a, b in pairs)
        job.add(row)


def steps(job: Job) -> None:
    for model, layouts in STEPS.items():
        base = f"{model} --mock-data --train-iters 20 --eval-iters 0 --bf16"
        single = f"{base} --global-batch-size 4"
        for name, words in {"one GPU": "", **layouts}.items():
            several = single if TP in words else f"{base} --global-batch-size {4 * job.size} {words}"
            try:
                if name == "one GPU":
                    row, gpus = job.on_one(timed(single)), 1
                else:
                    row, gpus = job.on_all(timed(f"{several} {words}")), job.size
            except RedlineError as error:  # all ranks refuse together
                row, gpus = {"error": str(error)}, job.size
            job.add({"layout": name, "gpus": gpus, **(row or {})})


def timed(words: str) -> Callable[[Environment], Row]:
    """Steps of a run of these words, as `redline bench step` takes them."""

    def work(environment: Environment) -> Row:
        row = bench_step(parse_args(words.split()), environment, steps=NUM_STEPS, say=lambda _: None)
        wanted = ("case", "tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes")
        return {key: row[key] for key in wanted} | {
            "predicted_memory_bytes": row["predicted_memory"]["total"]
        }

    return work


def train(words: str, gpus: int, folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a run; its record lies in `folder`."""
    command = [sys.executable, "-m", "redline", "train", *words.split(), "--save", str(folder)]
    if gpus > 1:
        command += ["--nproc-per-node", str(gpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stderr


def num_steps(folder: Path) -> int:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return sum(record["kind"] == "step" for record in records)


def children_of(parent: int) -> list[int]:
    """Processes whose parent that is: fields 1 and 4 of proc(5)'s stat."""
    stats = [path.read_text().rsplit(")", 1) for path in Path("/proc").glob("[0-9]*/stat")]
    return [int(head.split()[0]) for head, rest in stats if int(rest.split()[1]) == parent]


def kill(gpus: int, out: Path) -> None:
    """SIGKILL to the last rank after step 5; then the rest of the run on one GPU less."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        words = SMALL.replace("--train-iters 10", "--train-iters 100000")
        words = f"{words} --save-interval 2 --bf16 {SHARDED}"
        command = [sys.executable, "-m", "redline", "train", *words.split(), "--save", str(folder)]
        job = subprocess.Popen(
            [*command, "--nproc-per-node", str(gpus)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        metrics = folder / "metrics.jsonl"
        while job.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 5):
            time.sleep(0.2)
        os.kill(max(children_of(job.pid)), signal.SIGKILL)
        started = time.monotonic()
        _, said = job.communicate(timeout=90)
        row: Row = {"exit": job.returncode, "s_to_end": time.monotonic() - started, "said": said[-3000:]}
        done = num_steps(folder)
        resumed = words.replace("--train-iters 100000", f"--train-iters {done + 5}")
        code, said = train(f"{resumed} --load {folder}", max(1, gpus - 1), folder)
        row |= {
            "steps_before": done,
            "resume_exit": code,
            "steps_after": num_steps(folder) if not code else said,
        }
    print(row, flush=True)
    write_result(out, "parallel-kill", "cuda", [row])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=("equal", "kill", "steps"))
    parser.add_argument("--gpus", type=int, default=2, help="of kill; the others find their ranks")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args()
    for part in options.parts:
        out = options.out / f"parallel-{part}.json"
        if part == "kill":
            kill(options.gpus, out)
        else:
            {"equal": equal, "steps": steps}[part](Job(out, part))


if __name__ == "__main__":
    main()
