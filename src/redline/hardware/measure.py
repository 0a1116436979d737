"""A measured peak for machines without a data sheet (every CPU): the best of a short series of matrix
products.

It answers "how fast are large GEMMs here", which is the denominator a utilisation needs; it is named as
measured wherever it is printed, because it moves with the machine's load.
"""

from __future__ import annotations

import time

from redline.hardware.hardware import Hardware

# Large enough to reach the machine's rate, small enough that a slow core does several in the time allowed.
SIZES = {"cpu": 768, "cuda": 8192}


def measure_gemm_peak(dtype: str, seconds: float = 0.3, device: str = "cpu") -> float:
    """The best rate of a square matrix product in `dtype` within about `seconds`, in FLOP/s.

    Args:
        dtype: "fp64", "fp32", "bf16" or "fp16".
        seconds: how long to repeat the product after one warm-up.
        device: "cpu" or "cuda".
    """
    import torch

    size = SIZES[device]
    torch_dtype = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }[dtype]
    generator = torch.Generator(device).manual_seed(
        0
    )  # random data: constants would draw less power and flatter
    left = torch.rand((size, size), generator=generator, device=device).to(torch_dtype)
    out = torch.empty_like(left)
    best, spent = float("inf"), 0.0
    torch.mm(left, left, out=out)
    while spent < seconds:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(left, left, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return 2 * size**3 / best


def with_measured_peak(hardware: Hardware, dtype: str, seconds: float = 1.0) -> Hardware:
    """The same hardware with a peak for `dtype`: the data sheet's where there is one, else measured now."""
    if hardware.peak(dtype) is not None:
        return hardware
    rate = measure_gemm_peak(dtype, seconds, hardware.kind)
    return hardware.with_peak(dtype, rate, f"{dtype} measured: best of {seconds:g} s of square GEMMs")
