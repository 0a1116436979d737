"""Optimizer states in host memory: what they cost a step, and what is said of them."""

from __future__ import annotations

from redline.choice import Choice
from redline.config import OptimConfig, offloaded_share
from redline.formulas.memory import MemoryEstimate
from redline.formulas.time import round_trip_s
from redline.hardware import Hardware
from redline.plan.cost_rates import copy_bytes_per_s
from redline.units import format_bytes, format_duration


def travel_s(num_bytes: int, hardware: Hardware, *, overlap: bool = True) -> float | None:
    """Seconds a step in which states of so many bytes come and go; None where PCIe's rate is not known."""
    rate = copy_bytes_per_s(hardware)
    return None if rate is None else round_trip_s(num_bytes, rate, overlap=overlap)


def optimizer_offload_choice(
    optim: OptimConfig, memory: MemoryEstimate, hardware: Hardware
) -> tuple[Choice, ...]:
    """The record of states kept in host memory, with what that saves and costs a step; nothing without."""
    share = offloaded_share(optim)
    if not share:
        return ()
    asked = f"{share:.0%} of the states"
    if hardware.kind == "cpu":
        why = "on a CPU that saves nothing: it is the same memory"
        return (Choice("optimizer-offload", asked, asked, why),)
    moved, overlap = memory.fullest.host_states, optim.overlap_cpu_optimizer_d2h_h2d
    ways = "both ways at once" if overlap else "one way after the other"
    why = f"{format_bytes(moved)} in pinned host memory, which come and go in each step, {ways}"
    if (seconds := travel_s(moved, hardware, overlap=overlap)) is not None:
        why += f": about {format_duration(seconds)}"
    return (Choice("optimizer-offload", asked, asked, why),)
