"""The short test behind `redline doctor --measure`: GEMMs, copies and, with several GPUs, an all-reduce.

On GPUs it takes 30 seconds: GEMMs and copies on the first device, then the all-reduce over all of them. On a
CPU it takes three, and its rates stand by themselves: a CPU has no data sheet to hold them against.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from redline.hardware import measure_gemm_peak
from redline.units import GIB

GPU_SECONDS, CPU_SECONDS = 30.0, 3.0
REDUCED = GIB  # bytes of the all-reduce: large enough to reach the links' rate
WAIT_S = 60.0  # for the processes of the all-reduce


def measure(seconds: float | None = None) -> dict[str, float]:
    """{"gemm": FLOP/s, "copy": bytes/s, "all_reduce": bytes/s}, of what this machine has.

    Args:
        seconds: in all; None takes 30 on GPUs and 3 on a CPU.
    """
    import torch

    if not torch.cuda.is_available():
        each = (seconds or CPU_SECONDS) / 2
        return {"cpu_gemm": measure_gemm_peak("fp32", each), "cpu_copy": measure_copy("cpu", each)}
    several = torch.cuda.device_count() > 1
    each = (seconds or GPU_SECONDS) / (3 if several else 2)
    found = {"gemm": measure_gemm_peak("bf16", each, "cuda"), "copy": measure_copy("cuda", each)}
    if several and (rate := measure_all_reduce(torch.cuda.device_count(), "cuda", each)) is not None:
        found["all_reduce"] = rate
    return found


def measure_copy(device: str, seconds: float, num_bytes: int | None = None) -> float:
    """The best rate of a device copy, read and written bytes together, in bytes/s."""
    import torch

    size = num_bytes or (GIB if device == "cuda" else GIB // 8)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    best = spent = once()
    while spent < seconds:
        took = once()
        best, spent = min(best, took), spent + took
    return 2 * source.numel() * source.element_size() / best


def measure_all_reduce(
    ranks: int, device: str = "cuda", seconds: float = 10.0, num_bytes: int = REDUCED
) -> float | None:
    """The best rate at which one device sends in an all-reduce over all, in bytes/s; None if it fails.

    Each device has a process of its own (NCCL on GPUs, Gloo on a CPU); a ring sends 2 (n - 1) / n of it.
    """
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (ranks, port, device, seconds, num_bytes, results)
    workers = [context.Process(target=_reduce, args=(rank, *arguments)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    until = time.monotonic() + seconds + WAIT_S
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    failed = any(worker.exitcode != 0 for worker in workers)
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    return None if failed else float(results.get())


def _reduce(
    rank: int, ranks: int, port: int, device: str, seconds: float, num_bytes: int, results: Any
) -> None:
    """One rank of the all-reduce; the first one reports the best rate."""
    import torch
    import torch.distributed as dist

    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    tensor = torch.ones(num_bytes // 4, device=device)
    keep_on = torch.ones(1, device=device)
    best = float("inf")
    begun = time.perf_counter()
    for turn in range(1_000_000):
        dist.all_reduce(keep_on)  # all have arrived
        if keep_on.item() < ranks and turn > 1:  # some rank's time is over: every rank stops at the same turn
            break
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        if turn:
            best = min(best, time.perf_counter() - start)
        keep_on.fill_(float(time.perf_counter() - begun < seconds))
    if rank == 0:
        results.put(2 * (ranks - 1) / ranks * tensor.numel() * tensor.element_size() / best)
    dist.destroy_process_group()
