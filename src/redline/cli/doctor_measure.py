"""The short test behind `redline doctor --measure`: GEMM and copy rates through torch, 30 seconds at most."""

from __future__ import annotations

import time

from redline.hardware import measure_gemm_peak
from redline.units import GIB


def measure(seconds: float = 30.0) -> dict[str, float]:
    """{"gemm": FLOP/s, "copy": bytes/s} of this machine's first device, half of the time each."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bf16" if device == "cuda" else "fp32"
    return {
        "gemm": measure_gemm_peak(dtype, seconds / 2, device),
        "copy": measure_copy(device, seconds / 2),
    }


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
