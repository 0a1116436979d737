"""What this machine is: an accelerator from torch and the data sheets, a CPU from the kernel's own files.

torch is imported only when an accelerator may be asked about. Containers are respected: memory and cores are
what this process may use (cgroup limits, CPU affinity), not what the host has.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from types import MappingProxyType

from redline.errors import ConfigError
from redline.hardware.datasheet import GIGA, find_sheet, hardware_named
from redline.hardware.hardware import Hardware

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def detect(device: str = "auto") -> Hardware:
    """The machine behind `device`: "cuda", "cpu", or "auto" (the GPU where there is one).

    Raises: ConfigError when "cuda" is asked for and torch sees no such device, or for another word.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"--device {device} is not known.",
            why="Redline runs on cpu and cuda (which includes ROCm); auto takes the GPU where there is one.",
            mend="use --device auto, cpu or cuda.",
        )
    gpu = None if device == "cpu" else _detect_gpu()
    if gpu is None and device == "cuda":
        raise ConfigError(
            "--device cuda: torch sees no GPU on this machine.",
            why="the installed torch is built without CUDA, the driver is missing, or no device is visible.",
            mend="check `nvidia-smi` and CUDA_VISIBLE_DEVICES, install torch for CUDA, or use --device cpu.",
        )
    return gpu or detect_cpu()


def _detect_gpu() -> Hardware | None:
    """The first visible GPU, or None without torch or without a device."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    sheet = find_sheet(properties.name)
    link = sheet.link_gb_per_s if sheet else None
    return Hardware(
        name=properties.name,
        kind="cuda",
        memory_bytes=properties.total_memory,
        peak_flops=sheet.peak_flops if sheet else MappingProxyType({}),
        peak_source=sheet.source if sheet else "",
        bandwidth_bytes_per_s=sheet.bandwidth_gb_per_s * GIGA if sheet else None,
        link_bytes_per_s=link * GIGA if link else None,
        num_devices=torch.cuda.device_count(),
        cores=usable_cores(),
        compute_capability=None if torch.version.hip else (properties.major, properties.minor),
        power_w=sheet.power_w if sheet else None,
        pcie_bytes_per_s=sheet.pcie_gb_per_s * GIGA if sheet else None,
    )


def glance(proc: Path = PROC, cgroup: Path = CGROUP) -> Hardware:
    """The machine without asking torch: NVIDIA's driver names its GPUs under /proc; else the CPU.

    For commands that answer at once. A GPU's memory is then its data sheet's, 0 where there is no sheet.
    """
    names = []
    for path in sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information")):
        names += [line.partition(":")[2].strip() for line in _lines(path) if line.startswith("Model:")]
    if not names:
        return detect_cpu(proc, cgroup)
    known = hardware_named(names[0], len(names))
    return known or Hardware(name=names[0], kind="cuda", memory_bytes=0, num_devices=len(names))


def detect_cpu(proc: Path = PROC, cgroup: Path = CGROUP) -> Hardware:
    """The CPU and what of it this process may use. A CPU has no data sheet here: see `measure_gemm_peak`."""
    return Hardware(
        name=cpu_name(proc),
        kind="cpu",
        memory_bytes=usable_memory(proc, cgroup),
        cores=usable_cores(proc, cgroup),
    )


def cpu_name(proc: Path = PROC) -> str:
    """The model name as the kernel prints it."""
    for line in _lines(proc / "cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Cores this process may use: its affinity, cut by the cgroup's quota (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, math.ceil(quota / period))
    return max(cores, 1)


def usable_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of main memory this process may use: what the machine has, cut by the cgroup's limit."""
    total = _machine_memory(proc)
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _first_word(folder / name)
            if limit.isdigit():
                total = min(total, int(limit))
    return total


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of main memory free for this process now: the machine's, or what a cgroup's limit leaves.

    Page cache counts as free, the machine's and that which a cgroup is charged for: it is given back, read
    once (inactive) or again (active). Files in memory alone (tmpfs) are neither.
    """
    free = _meminfo(proc, "MemAvailable") or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for limit_name, usage_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, usage = (_first_word(folder / name) for name in (limit_name, usage_name))
            if limit.isdigit() and usage.isdigit():
                pages = (f"{prefix}{each}_file" for each in ("active", "inactive"))
                cache = sum(_statistic(folder / "memory.stat", name) for name in pages)
                free = min(free, int(limit) - int(usage) + cache)
    return max(free, 0)


def _machine_memory(proc: Path) -> int:
    return _meminfo(proc, "MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo(proc: Path, name: str) -> int | None:
    """A line of /proc/meminfo, in bytes."""
    kib = _statistic(proc / "meminfo", f"{name}:")
    return kib * 1024 if kib else None


def _statistic(path: Path, name: str) -> int:
    """The number behind a name, one of each a line; 0 where it is not there."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """The folders that can limit this process, from its own cgroup up to the root; version 1 and 2."""
    folders = [cgroup, cgroup / controller]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        root = cgroup if not controllers else cgroup / controller
        if not controllers or controller in controllers.split(","):
            parts = Path(path.lstrip("/")).parts
            folders += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds; (0, 0) when there is no limit."""
    words = " ".join(_lines(folder / "cpu.max")).split()  # version 2: "200000 100000" or "max 100000"
    if not words:
        words = [_first_word(folder / "cpu.cfs_quota_us"), _first_word(folder / "cpu.cfs_period_us")]
    if len(words) == 2 and all(word.isdigit() for word in words):
        return int(words[0]), int(words[1])
    return 0, 0


def _first_word(path: Path) -> str:
    return next(iter(" ".join(_lines(path)).split()), "")


def _lines(path: Path) -> list[str]:
    """The lines of a small kernel file; none when it is not there or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def driver_version() -> str | None:
    """The NVIDIA driver's version, None without one."""
    try:
        text = (PROC / "driver/nvidia/version").read_text()
    except OSError:
        return None
    return next((word for word in text.split() if word[:1].isdigit() and "." in word), None)
