"""Data parallelism on the GPUs of one host: see gpu_parallel.sh.

equal   losses of the same run on one GPU and on several, by layout
comm    seconds of each collective from 64 KiB to 1 GiB, and the line through them (run under torchrun)
kill    a rank is killed under load: how long until the job has ended, what it says, and whether it resumes
steps   tokens/s of the 1B and the 8-layer 8B model, by layout and bucket size
gemm    weight gradients added inside the GEMM against a GEMM and an addition, at the shapes of both models
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from redline.bench.record import write_result
from redline.config import read_environment

Row = dict[str, Any]
SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 4096 --seq-length 512 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --eval-iters 0 --save-interval 1000"
)
SHARDED = "--use-distributed-optimizer"
LAYOUTS = {
    "plain, late": "--no-overlap-grad-reduce",
    "plain": "",
    "sharded, late": f"{SHARDED} --no-overlap-grad-reduce --no-overlap-param-gather",
    "sharded, gathered late": f"{SHARDED} --no-overlap-param-gather",
    "sharded": SHARDED,
}
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
MODELS = {
    "1B": "--preset llama3.2-1b --seq-length 4096 --micro-batch-size 2",
    "8B, 8 layers": "--preset llama3-8b --num-layers 8 --seq-length 4096 --micro-batch-size 1",
}
BUCKETS = (10_000_000, 40_000_000, 160_000_000)


def train(words: str, gpus: int, folder: Path, timeout: float = 200) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of a run; its summary lies in `folder`."""
    command = [sys.executable, "-m", "redline", "train", *words.split(), "--save", str(folder)]
    if gpus > 1:
        command += ["--nproc-per-node", str(gpus)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stderr, time.monotonic() - started


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


def equal(gpus: int) -> list[Row]:
    layouts = {**LAYOUTS, "two instances": f"{SHARDED} --num-distributed-optimizer-instances {gpus}"}
    layouts |= {"tp": TP} if gpus % 2 == 0 else {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for precision in ("--fp32", "--bf16"):
            alone = Path(place) / f"one{precision}"
            train(f"{SMALL} {precision}", 1, alone)
            for name, words in layouts.items():
                folder = Path(place) / f"{name}{precision}".replace(" ", "-")
                code, said, took = train(f"{SMALL} {precision} {words}", gpus, folder)
                row: Row = {"layout": name, "precision": precision[2:], "gpus": gpus, "exit": code, "s": took}
                if code:
                    row["error"] = said[-2000:]
                else:
                    pairs = list(zip(losses(alone), losses(folder), strict=True))
                    row["first"] = abs(pairs[0][1] / pairs[0][0] - 1)
                    row["largest"] = max(abs(b / a - 1) for a, b in pairs)
                rows.append(row)
                print(row, flush=True)
    return rows


def steps(gpus: int) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for model, shape in MODELS.items():
            base = f"{shape} --mock-data --train-iters 12 --eval-iters 0 --bf16 --no-save-optim"
            single = f"{base} --global-batch-size 4"
            several = f"{base} --global-batch-size {4 * gpus}"
            variants = {"one GPU": (1, single)}
            variants |= {name: (gpus, f"{several} {words}") for name, words in LAYOUTS.items()}
            for size in BUCKETS:
                variants[f"sharded, {size:,} elements"] = (
                    gpus,
                    f"{several} {SHARDED} --ddp-bucket-size {size}",
                )
            if gpus == 2:
                variants["tp"] = (gpus, f"{base} --global-batch-size 4 {TP}")
            for name, (count, words) in variants.items():
                folder = Path(place) / f"{model}-{name}".replace(" ", "-").replace(",", "")
                code, said, took = train(words, count, folder)
                row: Row = {"model": model, "layout": name, "gpus": count, "exit": code, "s": took}
                if code:
                    row["error"] = said[-2000:]
                else:
                    summary = json.loads((folder / "summary.json").read_text())
                    row |= {
                        key: summary[key] for key in ("tokens_per_s", "step_time_s", "measured_memory_bytes")
                    }
                    row["predicted_memory_bytes"] = summary["predicted_memory"]["total"]
                    row["per_gpu"] = row["tokens_per_s"] / count
                shutil.rmtree(folder, ignore_errors=True)
                rows.append(row)
                print(row, flush=True)
    return rows


def children_of(parent: int) -> list[int]:
    """Processes whose parent that is: fields 1 and 4 of proc(5)'s stat."""
    stats = [path.read_text().rsplit(")", 1) for path in Path("/proc").glob("[0-9]*/stat")]
    return [int(head.split()[0]) for head, rest in stats if int(rest.split()[1]) == parent]


def kill(gpus: int) -> list[Row]:
    """SIGKILL to the last rank after step 5; then the rest of the run on one GPU less."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        words = SMALL.replace("--train-iters 10", "--train-iters 100000")
        words = f"{words.replace('--save-interval 1000', '--save-interval 2')} --bf16 {SHARDED}"
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
        done = len(losses(folder))
        resumed = words.replace("--train-iters 100000", f"--train-iters {done + 5}")
        code, said, _ = train(f"{resumed} --load {folder}", max(1, gpus - 1), folder)
        row |= {
            "steps_before": done,
            "resume_exit": code,
            "steps_after": len(losses(folder)) if not code else said,
        }
    print(row, flush=True)
    return [row]


def comm(repeats: int = 10) -> list[Row]:
    import torch
    import torch.distributed as dist

    environment = read_environment()
    torch.cuda.set_device(environment.local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", environment.local_rank))
    size, rank = dist.get_world_size(), dist.get_rank()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    rows: list[Row] = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
        points = []
        for power in range(16, 31):
            whole = torch.ones(2**power // 2, dtype=torch.bfloat16, device="cuda")
            own = whole[rank * (len(whole) // size) : (rank + 1) * (len(whole) // size)]

            def once(kind: str = kind, whole: Any = whole, own: Any = own) -> None:
                if kind == "all_reduce":
                    dist.all_reduce(whole)
                elif kind == "all_gather":
                    gather(whole, own)
                elif kind == "reduce_scatter":
                    scatter(own, whole)
                elif rank < 2:
                    dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)

            for _ in range(3):
                once()
            times = []
            for _ in range(repeats):
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                once()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            took = statistics.median(times)
            share = {"all_reduce": 2 * (size - 1) / size, "send": 1.0}.get(kind, (size - 1) / size)
            sent = share * 2**power
            points.append((sent, took))
            rows.append({"kind": kind, "bytes": 2**power, "s": took, "bus_bytes_per_s": sent / took})
        slope, alpha = statistics.linear_regression(*zip(*points, strict=True))
        rows.append(
            {"kind": kind, "gpus": size, "alpha_s": max(alpha, points[0][1]), "bytes_per_s": 1 / slope}
        )
        if rank == 0:
            print(rows[-1], flush=True)
    dist.destroy_process_group()
    return rows if rank == 0 else []


def gemm(tokens: int = 8192, repeats: int = 20) -> list[Row]:
    import torch

    from redline.model.gemm import add_wgrad

    shapes = {
        "1B": {
            "qkv": (3072, 2048),
            "proj": (2048, 2048),
            "fc1": (16384, 2048),
            "fc2": (2048, 8192),
            "head": (128256, 2048),
        },
        "8B": {
            "qkv": (6144, 4096),
            "proj": (4096, 4096),
            "fc1": (28672, 4096),
            "fc2": (4096, 14336),
            "head": (128256, 4096),
        },
    }
    rows: list[Row] = []
    for model, sites in shapes.items():
        for site, (out, size) in sites.items():
            x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
            dy = torch.randn(tokens, out, device="cuda", dtype=torch.bfloat16)
            grad = torch.zeros(out, size, device="cuda")
            times: dict[bool, list[float]] = {True: [], False: []}
            for number in range(repeats + 3):
                for fuse in (True, False):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    add_wgrad(grad, dy, x, fuse)
                    end.record()
                    torch.cuda.synchronize()
                    if number >= 3:
                        times[fuse].append(begin.elapsed_time(end))
            fused, apart = (statistics.median(times[fuse]) for fuse in (True, False))
            row = {"model": model, "site": site, "fused_ms": fused, "apart_ms": apart, "ratio": apart / fused}
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("equal", "comm", "kill", "steps", "gemm"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    parts = {"equal": equal, "kill": kill, "steps": steps}
    rows = (
        parts[options.part](options.gpus)
        if options.part in parts
        else {"comm": comm, "gemm": gemm}[options.part]()
    )
    if rows:
        write_result(options.out, f"parallel-{options.part}", "cuda", rows)


if __name__ == "__main__":
    main()
