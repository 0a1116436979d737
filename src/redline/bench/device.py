"""What a GPU did while something ran: its kernels by name, its clock and power."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

LONGEST_NAME = 120  # templates of C++ go on for a thousand characters


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel: how often it ran, and for how long in all."""

    name: str
    count: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def kernel_times(run: Callable[[], object]) -> list[KernelTime]:
    """The kernels of one call, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    found = [
        KernelTime(each.key[:LONGEST_NAME], each.count, each.self_device_time_total / 1e6)
        for each in seen.key_averages()
        if each.device_type == torch.profiler.DeviceType.CUDA and each.self_device_time_total > 0
    ]
    return sorted(found, key=lambda each: each.seconds, reverse=True)


def clocks(device_type: str) -> dict[str, float] | None:
    """The card's clock and power at this moment, None where NVIDIA's management library does not tell."""
    if device_type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        }
    except Exception:  # the package is optional, and a container may hide the library
        return None
