"""Times the fp8 casts on one GPU under other tiles: usage: python benchmarks/tune_fp8.py OUT.json"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.testing import do_bench

from redline.kernels.fp8 import bench, kernel
from redline.kernels.fp8.kernel import Tile

VARIANTS: dict[str, tuple[int, list[Tile]]] = {
    "cast": (
        0,
        [
            Tile(r, c, w)
            for r, c, w in ((4, 1024, 4), (8, 1024, 8), (16, 1024, 8), (8, 512, 4), (32, 512, 16))
        ],
    ),
    "cast both": (
        2,
        [
            Tile(r, c, w)
            for r in (64, 128, 256)
            for c in (32, 64, 128)
            for w in (4, 8)
            if 4096 <= r * c <= 16384
        ],
    ),
    "norm": (3, [Tile(n, 1, w) for n in (4096, 8192, 16384) for w in (4, 8, 16)]),
    "activation": (
        4,
        [Tile(r, c, w) for r, c, w in ((2, 1024, 4), (4, 1024, 4), (4, 1024, 8), (8, 1024, 8), (1, 2048, 4))],
    ),
    "activation backward": (
        5,
        [
            Tile(r, c, w, s)
            for r, c in ((64, 32), (64, 64), (128, 32), (32, 64), (128, 64))
            for w in (4, 8)
            for s in (0, 8)
        ],
    ),
}


def copy_rate(device: torch.device) -> float:
    """GB/s of a device copy, read and written."""
    source, target = (torch.empty(1 << 29, dtype=torch.bfloat16, device=device) for _ in "ab")
    return 2 * source.nbytes / do_bench(lambda: target.copy_(source), return_mode="median") / 1e6


def main(path: str) -> None:
    device = torch.device("cuda")
    copy = copy_rate(device)
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "copy_gb_per_s": copy}
    for name, (case_index, tiles) in VARIANTS.items():
        case = bench.CASES[case_index]
        inputs, run = case.make_inputs(device, torch.bfloat16), case.providers["fused"]()
        before = kernel.TILES[name]
        for tile in tiles:
            kernel.TILES[name] = tile
            time_ms = do_bench(lambda: run(*inputs), return_mode="median")  # noqa: B023
            share = case.bytes_forward / time_ms / 1e6 / copy
            found.setdefault(name, []).append({"tile": str(tile), "us": time_ms * 1e3, "share": share})
        kernel.TILES[name] = before
        best = max(found[name], key=lambda row: row["share"])
        print(f"{name}: {best['share']:.0%} {best['tile']}", [round(row["share"], 2) for row in found[name]])
    q = torch.randn(8192, 14336, device=device).to(torch.float8_e4m3fn)
    for tile in (Tile(128, 128, 8), Tile(128, 128, 4), Tile(64, 128, 4), Tile(256, 64, 8), Tile(128, 256, 8)):
        kernel.TILES["transpose"] = tile
        time_ms = do_bench(lambda: kernel.transpose(q), return_mode="median")
        found.setdefault("transpose", []).append(
            {"tile": str(tile), "share": 2 * q.nbytes / time_ms / 1e6 / copy}
        )
    print("transpose", [(row["tile"], round(row["share"], 2)) for row in found["transpose"]])
    with open(path, "w") as handle:
        json.dump(found, handle, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
