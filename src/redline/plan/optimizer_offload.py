"""Optimizer states in host memory: what is said of them."""

from __future__ import annotations

from redline.choice import Choice
from redline.config import OptimConfig
from redline.formulas.memory import MemoryEstimate
from redline.formulas.time import round_trip_s
from redline.hardware import Hardware
from redline.units import format_bytes, format_duration

COPY_SHARE = 0.85  # of PCIe's nominal rate, by long copies from and to pinned memory


def optimizer_offload_choice(
    optim: OptimConfig, memory: MemoryEstimate, hardware: Hardware
) -> tuple[Choice, ...]:
    """The record of states kept in host memory, with what that saves and costs a step; nothing without."""
    share = optim.offloaded_share
    if not share:
        return ()
    asked = f"{share:.0%} of the states"
    moved = sum(memory.fullest.host.values())
    if hardware.kind == "cpu":
        why = "on a CPU that saves nothing: it is the same memory"
        return (Choice("optimizer-offload", asked, asked, why),)
    overlap = optim.overlap_cpu_optimizer_d2h_h2d
    ways = "both ways at once" if overlap else "one way after the other"
    why = f"{format_bytes(moved)} in pinned host memory, which come and go in each step, {ways}"
    if hardware.pcie_bytes_per_s is not None:
        seconds = round_trip_s(moved, COPY_SHARE * hardware.pcie_bytes_per_s, overlap=overlap)
        why += f": about {format_duration(seconds)}"
    return (Choice("optimizer-offload", asked, asked, why),)
