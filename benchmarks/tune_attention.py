"""Tries launch choices of Redline's attention kernels and prints the fastest: what local/config.py holds.

usage: PYTHONPATH=src python benchmarks/tune_attention.py [--head 64 128 256] [--kernel forward dq dkv]
           [--out FILE]
Needs a GPU. Each kernel is varied alone, the two others as they are; causal, 8192 x 2, 32/8 heads, bf16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from redline.attention import MaskSpec
from redline.attention.local import launch, variant_of
from redline.attention.local.config import Tiles, launch_of
from redline.attention.timing import HEAD_START_CYCLES
from redline.formulas.flops import attention_pass_flops

LENGTH, BATCH, HEADS, GROUPS = 8192, 2, 32, 8
ROUNDS = 7
SHARED_BYTES = 227 << 10


def candidates(kernel: str, head_dim: int) -> Iterator[Tiles]:
    """Tiles worth a try: a warp group for 64 rows, and what fits in shared memory."""
    for rows, walked, stages in itertools.product((128, 64), (128, 64, 32), (2, 3, 4)):
        held = rows * head_dim * 2 * (1 if kernel == "forward" else 2)
        if held + stages * walked * head_dim * 2 * 2 > SHARED_BYTES or (kernel == "forward" and walked < 64):
            continue
        queries, keys = (walked, rows) if kernel == "dkv" else (rows, walked)
        yield Tiles(queries, keys, rows // 16, stages, tma=True)


def seconds(run: Callable[[], object]) -> float:
    """Median device time; infinity where it does not compile or launch."""
    try:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
    except Exception as error:  # out of shared memory or registers, or the compiler gives up
        print("   ", str(error).splitlines()[0][:100] if str(error) else type(error).__name__)
        return float("inf")
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def tune(head_dim: int, kernel: str) -> Iterator[dict[str, Any]]:
    """The time of every candidate for one kernel; that of backward holds both of its kernels."""
    shape = (LENGTH, BATCH)
    q, k, v, do = (
        torch.randn(*shape, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    variant = variant_of(MaskSpec(), head_dim**-0.5)
    out, lse = launch.forward(q, k, v, *variant)
    plain = launch_of(head_dim, 2, torch.cuda.current_device())
    ahead, back = (each * BATCH for each in attention_pass_flops([LENGTH], HEADS, head_dim))

    def run() -> object:
        if kernel == "forward":
            return launch.forward(q, k, v, *variant)
        return launch.backward(do, q, k, v, out, lse, *variant)

    for tiles in dict.fromkeys([getattr(plain, kernel), *candidates(kernel, head_dim)]):
        chosen = replace(plain, **{kernel: tiles})
        launch.launch_of = lambda *_, chosen=chosen: chosen
        taken = seconds(run)
        rate = (ahead if kernel == "forward" else back) / taken / 1e12
        print(f"head {head_dim} {kernel} {tiles}: {taken * 1e3:.3f} ms {rate:.0f} TFLOP/s", flush=True)
        yield {"head": head_dim, "kernel": kernel, **asdict(tiles), "seconds": taken}
    launch.launch_of = launch_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--kernel", nargs="+", default=["forward", "dq", "dkv"])
    parser.add_argument("--out")
    args = parser.parse_args()
    found = []
    for head_dim, kernel in itertools.product(args.head, args.kernel):
        timed = [each for each in tune(head_dim, kernel) if each["seconds"] != float("inf")]
        print("BEST", min(timed, key=lambda each: each["seconds"]), flush=True)
        found += timed
        if args.out:
            with open(args.out, "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
