"""Times the fp8 casts on one GPU under other tiles: usage: python benchmarks/tune_fp8.py OUT.json [LIST...]

LIST: which of VARIANTS, all of them where none is named.
Processes beside each other compile the variants first and hold each to the plain twin: a wrong one is
reported and not timed. What was measured is written after each row, and no row is begun after LIMIT_S.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from redline.kernels.bench_case import BenchCase
from redline.kernels.fp8 import bench
from redline.kernels.fp8.tiles import TILES, Tile

STARTED = time.monotonic()
LIMIT_S = 88.0  # for the first round; the second, of the best, takes a second or two
ROWS = 1024  # that a variant is checked on, at the case's own width: the form that is compiled is the same
BEST = 2  # of each list, that are timed again and longer


def _tiles(shapes: list[tuple[int, int, int]], groups: tuple[int, ...] = (1,)) -> list[Tile]:
    return [Tile(*shape, group=group) for shape, group in product(shapes, groups)]


BACKWARD = [(64, 64, 4), (64, 128, 8), (64, 64, 8), (32, 128, 4), (128, 64, 8), (32, 64, 2)]
SUMS = [(128, 64, 4), (128, 64, 8), (256, 64, 16), (256, 64, 8), (64, 64, 4), (64, 64, 2), (64, 128, 8)]
PAIRS_OF_SUMS = [(64, 64, 4), (128, 64, 8), (32, 64, 2), (64, 64, 8), (64, 128, 8)]
TURNS = [(64, 128, 4), (128, 64, 4), (64, 64, 4), (64, 128, 8), (128, 128, 8), (128, 128, 16), (128, 64, 8)]
BYTES = [(128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 64, 4), (256, 64, 8), (256, 128, 8)]
BYTES += [(256, 128, 4), (256, 128, 16), (128, 256, 16), (256, 256, 16), (512, 64, 8), (512, 128, 16)]
BLOCKS = [Tile(128, 128, 8), Tile(128, 128, 16), Tile(128, 256, 8), Tile(256, 128, 8)]
BLOCKS += [Tile(128, 128, 4, group=group) for group in (1, 4, 8)]
WHOLE = [(4096, 8, 4), (4096, 8, 3), (4096, 16, 2), (4096, 16, 3), (4096, 4, 4), (8192, 8, 2)]
VARIANTS: dict[str, list[Tile]] = {  # what is tried on each case of bench.CASES, after the tile in use
    "blocks": BLOCKS,
    "squares": [Tile(128, 128, warps) for warps in (4, 8, 16)],
    "transpose": _tiles(BYTES, (0, 1)),
    "biased activation backward": _tiles(SUMS, (1, 2, 8)),
    "biased gated activation backward": _tiles(PAIRS_OF_SUMS, (1, 2, 8)),
    "activation backward, limited": _tiles(BACKWARD, (1, 8)),
    "activation backward, not gated": _tiles(BACKWARD, (1, 8)),
    "activation backward": _tiles(BACKWARD, (1, 8)),
    "cast both": _tiles(TURNS, (1, 4)),
    "cast both, wide": _tiles(TURNS, (1, 4)),
    "activation": _tiles([(8, 1024, 8), (4, 1024, 4), (8, 512, 4), (2, 2048, 4), (2, 1024, 2)]),
    "norm": [Tile(rows, 1, warps, per_sm) for rows, warps, per_sm in WHOLE],
    "cast": _tiles([(2, 4096, 8), (4, 4096, 8), (4, 4096, 16), (8, 1024, 8), (1, 4096, 4)]),
}
EXACT = {"blocks", "squares"}  # lists whose results are the twin's, bit for bit
CASES = {
    "cast": f"cast {bench.TOKENS} x {bench.H}",
    "cast both": f"cast, both layouts, {bench.TOKENS} x {bench.H}",
    "cast both, wide": f"cast, both layouts, {bench.T} x {2 * bench.F}",
    "blocks": f"cast by blocks, both layouts, {bench.TOKENS} x {bench.H}",
    "squares": f"cast by squares, both layouts, {2 * bench.F} x {bench.H}",
    "transpose": f"transpose of fp8, {bench.T} x {bench.F}",
    "norm": f"RMSNorm to fp8, {bench.TOKENS} x {bench.H}",
    "activation": f"SwiGLU to fp8, {bench.T} x 2*{bench.F}",
    "biased activation backward": f"GELU backward to fp8, with its bias, {bench.T} x {bench.F}",
    "biased gated activation backward": f"SwiGLU backward to fp8, with its bias, {bench.T} x 2*{bench.F}",
    "activation backward, not gated": f"GELU backward to fp8, {bench.T} x {bench.F}",
    "activation backward, limited": f"SwiGLU backward to fp8, {bench.T} x 2*{bench.F}, limited",
    "activation backward": f"SwiGLU backward to fp8, {bench.T} x 2*{bench.F}",
}


def case_of(name: str) -> BenchCase:
    """The case that a list of VARIANTS is tried on."""
    return next(case for case in bench.CASES if case.name == CASES[name])


def kind_of(name: str) -> str:
    """The entry of TILES that it is about."""
    return name.split(",")[0]


def variants(names: Iterable[str] = VARIANTS) -> Iterator[tuple[str, Tile]]:
    """All of these lists, beginning with what is in use, which is tried once if it is in its list too."""
    for name in names:
        for tile in dict.fromkeys((TILES[kind_of(name)], *VARIANTS[name])):
            yield name, tile


def fault(found: Tensor, wanted: Tensor) -> str:
    """How a result differs from the twin's, but for 3 in 100 that were rounded to the other side; or ""."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {tuple(found.shape)} in place of {wanted.dtype} {tuple(wanted.shape)}"
    a, b = found.float(), wanted.float()
    if not a.numel():
        return ""
    bound = 0.26 * torch.maximum(a.abs(), b.abs()) + 1e-4 * b.abs().max()
    far, others = int(((a - b).abs() > bound).sum()), (a != b).float().mean().item()
    if (found.itemsize == 1 and others > 0.03) or far or not a.isfinite().all():
        return f"{far} of {a.numel()} values are far off, {others:.1%} differ"
    return ""


def differing(found: Tensor, wanted: Tensor) -> str:
    """How many values are not the twin's; or ""."""
    others = int((found.float() != wanted.float()).sum())
    return f"{others} of {found.numel()} values differ" if others else ""


def check(name: str, tile: Tile, device: str = "cuda", rows: int = ROWS) -> str:
    """Compile a variant and hold it to the plain twin: what is wrong with it, or ""."""
    try:
        case = case_of(name)
        torch.manual_seed(1)
        whole = case.make_inputs(torch.device(device), torch.bfloat16)
        inputs = [each[:rows] if each.dim() == 2 else each for each in whole]
        before = TILES[kind_of(name)]
        TILES[kind_of(name)] = tile
        if device == "cuda":  # what a kernel leaves unwritten must not be what another one wrote
            torch.cuda.empty_cache()
            torch.full((1 << 29,), 85, dtype=torch.uint8, device=device)
        results = []
        for provider in ("fused", "eager"):
            amax = torch.zeros_like(inputs[-1])
            outputs = case.providers[provider]()(*inputs[:-1], amax)
            results.append([*(outputs if isinstance(outputs, tuple) else (outputs,)), amax])
        TILES[kind_of(name)] = before
        return "; ".join(filter(None, map(differing if name in EXACT else fault, *results)))
    except Exception as error:  # a variant that does not even run must not cost the others
        return f"{type(error).__name__}: {error}"[:300]


def time_s(run: Callable[[], object], rep: int = 25) -> float:
    """Median seconds on the device, the cache cleared before each call."""
    return do_bench(run, warmup=10, rep=rep, return_mode="median") / 1e3


def copy_rate(num_bytes: int) -> float:
    """Bytes a second of a device copy that reads and writes so many, timed like the casts."""
    source, target = (torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda") for _ in "ab")
    return num_bytes / time_s(lambda: target.copy_(source), 100)


def _result(future: Future[str]) -> str:
    error = future.exception()
    return future.result() if error is None else f"not checked: {type(error).__name__}: {error}"[:300]


def checked(names: Iterable[str] = VARIANTS) -> dict[tuple[str, Tile], str]:
    """What is wrong with each variant, or "", found by as many processes as there are cores for."""
    every = list(dict.fromkeys(variants(names)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=context) as pool:
        futures: list[Future[str]] = [pool.submit(check, *each) for each in every]
        return {each: _result(future) for each, future in zip(every, futures, strict=True)}


def main(path: str, *names: str) -> None:
    """Try the variants, of these lists or of all.

    Each share is of a copy of 1 GiB and of a copy of as many bytes as the cast moves.
    """
    device = torch.device("cuda")
    names = names or tuple(VARIANTS)
    faults = checked(names)
    found: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "commit": os.environ.get("COMMIT", "unknown"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "checked_after_s": time.monotonic() - STARTED,
    }
    found["copy_bytes_per_s"] = copy = copy_rate(1 << 31)
    print(
        f"{len(faults)} variants checked after {found['checked_after_s']:.0f} s; copy {copy / 1e12:.2f} TB/s"
    )

    def keep(name: str, row: dict[str, Any]) -> None:
        found.setdefault(name, []).append(row)
        with open(path, "w") as handle:
            json.dump(found, handle, indent=1)

    for name in names:
        case, kind = case_of(name), kind_of(name)
        inputs, run = case.make_inputs(device, torch.bfloat16), case.providers["fused"]()
        before, alike, times = TILES[kind], copy_rate(case.bytes_forward), dict[Tile, float]()

        def measure(tile: Tile, rep: int) -> None:
            TILES[kind] = tile  # noqa: B023
            times[tile] = time_s(lambda: run(*inputs), rep)  # noqa: B023
            rate = case.bytes_forward / times[tile]  # noqa: B023
            shares = {"of_copy": rate / copy, "of_like_copy": rate / alike}  # noqa: B023
            keep(name, {"tile": str(tile), "us": times[tile] * 1e6, **shares, "rep": rep})  # noqa: B023
            TILES[kind] = before  # noqa: B023

        for tile in (tile for each, tile in faults if each == name):
            if wrong := faults[name, tile]:
                print(f"{name}: WRONG {tile}: {wrong}")
                keep(name, {"tile": str(tile), "wrong": wrong})
            elif time.monotonic() - STARTED < LIMIT_S:
                measure(tile, 25)
            else:
                keep(name, {"tile": str(tile), "left_out": "no time"})
        for tile in sorted(times, key=lambda tile: times[tile])[:BEST]:
            measure(tile, 100)
        for tile in sorted(times, key=lambda tile: times[tile])[:BEST]:
            rate = case.bytes_forward / times[tile]
            print(f"{name}: {rate / copy:.1%} ({rate / alike:.1%}), {times[tile] * 1e6:.1f} us, {tile}")
    print(f"after {time.monotonic() - STARTED:.0f} s: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
