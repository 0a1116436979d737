"""Launches through Triton's own dispatch, and again through redline.kernels.launch, on a driver that notes.

Run as a script, not interpreted: kernels are compiled for Hopper, no GPU is needed. Exits with 1 where the
second launch hands the driver anything else than the first.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

LAUNCHES: list[tuple[Any, ...]] = []


class NotingLauncher:
    """What Triton makes of a compiled kernel: called with grid, stream, handles, arguments."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        LAUNCHES.append((x, y, z, stream, function, *rest[4:]))  # without metadata and hooks


class NotingUtils:
    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return "module", f"handle of {name}", 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}


class NotingDriver:
    """A driver of one Hopper GPU that launches nothing."""

    utils, launcher_cls = NotingUtils(), NotingLauncher

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 77


def same(a: Any, b: Any) -> bool:
    """Equal values, or tensors of one form: those that a launcher allocates are new each time."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
    return type(a) is type(b) and a == b


def main() -> int:
    """Two rooms: constants by place (norm), constants by name (linear cross-entropy)."""
    from triton.runtime import driver

    driver.set_active(NotingDriver())
    from redline.kernels.linear_cross_entropy.kernel import loss_and_gradient
    from redline.kernels.loss_spec import LossSpec
    from redline.kernels.norm_triton import norm_backward, norm_forward

    x, weight, dweight = torch.randn(64, 256).bfloat16(), torch.ones(256).bfloat16(), torch.zeros(256)
    logits, labels, loss = torch.randn(4, 1024), torch.zeros(4, dtype=torch.int64), torch.empty(4)
    for _ in range(2):
        y, _, _, rstd = norm_forward(x, None, weight, None, 1e-5, False, torch.bfloat16, False)
        norm_backward(y, None, x, weight, None, rstd, dweight, None, (True, False), False)
        loss_and_gradient(logits, labels, None, None, loss, None, LossSpec(1000), True)
    half = len(LAUNCHES) // 2
    pairs = list(zip(LAUNCHES[:half], LAUNCHES[half:], strict=True))
    wrong = [a for a, b in pairs if len(a) != len(b) or not all(map(same, a, b))]
    from redline.kernels import norm_triton, triton_common
    from redline.kernels.linear_cross_entropy import kernel as head

    kernels = (
        norm_triton._norm_fwd_kernel,
        norm_triton._norm_bwd_kernel,
        triton_common._column_sums_kernel,
        head._loss_and_gradient_kernel,
    )
    remembered = [len(kernel._found) for kernel in kernels]
    print(f"{half} launches, {len(wrong)} differ, remembered {remembered}")
    return int(bool(wrong) or half != 4 or remembered != [1, 1, 1, 1])


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
