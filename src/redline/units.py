"""Bytes, FLOPs, seconds and counts as people read them, and sizes in whole units. GiB is 2^30."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`: (130, 64) -> 192."""
    return -(-number // multiple) * multiple


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.50 KiB'; 3 GiB -> '3.00 GiB'."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """1_235_814_400 -> '1.24B'; 12_345 -> '12.3k'; 512 -> '512'."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.3g}"


def format_flops_per_s(flops_per_s: float) -> str:
    """6.5e14 -> '650 TFLOP/s'."""
    for unit, name in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if abs(flops_per_s) >= unit:
            return f"{flops_per_s / unit:.3g} {name}"
    return f"{flops_per_s:.3g} FLOP/s"


def format_duration(seconds: float) -> str:
    """75 -> '1m15s'; 0.0021 -> '2.1 ms'; 7300 -> '2h01m'."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
