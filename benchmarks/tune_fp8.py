"""Times the fp8 casts on one GPU under other tiles: usage: python benchmarks/tune_fp8.py OUT.json"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.testing import do_bench

from redline.kernels.fp8 import bench, kernel
from redline.kernels.fp8.kernel import Tile

CASTS = [
    (4, 1024, 4),
    (8, 1024, 8),
    (8, 512, 4),
    (4, 2048, 8),
    (2, 4096, 8),
    (1, 4096, 4),
    (2, 2048, 4),
    (16, 512, 8),
]
TURNS = [
    (r, c, w, 0, g)
    for r, c, w in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (256, 64, 8))
    for g in (1, 4, 16)
]
GATES = [(2, 1024, 4), (4, 1024, 4), (4, 1024, 8), (8, 1024, 8), (1, 2048, 4), (2, 2048, 8)]
NORMS = [(n, w, s) for n in (4096, 8192) for w in (4, 8) for s in (0, 2, 3, 4)] + [
    (16384, 8, 0),
    (16384, 16, 0),
]
VARIANTS: dict[str, tuple[int, list[Tile]]] = {  # the case of bench.CASES, and what is tried on it
    "cast": (0, [Tile(*each) for each in CASTS]),
    "cast both": (1, [Tile(*each) for each in TURNS]),
    "cast both, wide": (2, [Tile(*each) for each in TURNS]),
    "norm": (4, [Tile(n, 1, w, s) for n, w, s in NORMS]),
    "activation": (5, [Tile(*each) for each in GATES]),
    "activation backward": (6, [Tile(*each) for each in GATES]),
}


def time_s(run: Callable[[], object]) -> float:
    """Median seconds on the device, the cache cleared before each call."""
    return do_bench(run, rep=60, return_mode="median") / 1e3


def copy_rate(num_bytes: int) -> float:
    """Bytes a second of a device copy that reads and writes so many, timed like the casts."""
    source, target = (torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda") for _ in "ab")
    return num_bytes / time_s(lambda: target.copy_(source))


def main(path: str) -> None:
    """Try the variants; each share is of a copy of 1 GiB and of a copy of as many bytes as the cast moves."""
    device = torch.device("cuda")
    copy = copy_rate(1 << 31)
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "copy_bytes_per_s": copy}

    def note(name: str, tile: Tile, num_bytes: int, seconds: float, alike: float) -> None:
        rate = num_bytes / seconds
        row = {"tile": str(tile), "us": seconds * 1e6, "of_copy": rate / copy, "of_like_copy": rate / alike}
        found.setdefault(name, []).append(row)

    for name, (case_index, tiles) in VARIANTS.items():
        case, kind = bench.CASES[case_index], name.split(",")[0]
        inputs, run = case.make_inputs(device, torch.bfloat16), case.providers["fused"]()
        before, alike = kernel.TILES[kind], copy_rate(case.bytes_forward)
        for tile in tiles:
            kernel.TILES[kind] = tile
            note(name, tile, case.bytes_forward, time_s(lambda: run(*inputs)), alike)  # noqa: B023
        kernel.TILES[kind] = before
    q = torch.randn(8192, 14336, device=device).to(torch.float8_e4m3fn)
    alike = copy_rate(2 * q.nbytes)
    for rows, cols, warps in ((128, 128, 8), (128, 128, 4), (256, 64, 8), (128, 256, 8)):
        for group in (1, 8):
            kernel.TILES["transpose"] = tile = Tile(rows, cols, warps, 0, group)
            note("transpose", tile, 2 * q.nbytes, time_s(lambda: kernel.transpose(q)), alike)
    for name, rows in found.items():
        if isinstance(rows, list):
            best = max(rows, key=lambda row: row["of_copy"])
            print(f"{name}: {best['of_copy']:.0%}, {best['of_like_copy']:.0%} of its like, {best['tile']}")
    with open(path, "w") as handle:
        json.dump(found, handle, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
