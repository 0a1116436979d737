"""What the ranks of one host take of its memory, held against what it has."""

from __future__ import annotations

from collections.abc import Iterator

from redline.formulas.host import ACTIVATIONS, ROUNDING, SNAPSHOT
from redline.formulas.memory import StageMemory
from redline.hardware import Hardware
from redline.plan.plan import Plan
from redline.units import format_bytes


def host_need(plan: Plan, hardware: Hardware, ranks: int) -> int:
    """Bytes that so many ranks take together; on a CPU all that they train with is there."""
    stage = plan.memory.fullest
    return ranks * (stage.host_total + (stage.reserved if hardware.kind == "cpu" else 0))


def ranks_of_a_host(plan: Plan, hardware: Hardware) -> int:
    """How many share one host: one a GPU; processes on a CPU are all on this one."""
    world = plan.grid.world_size
    return world if hardware.kind == "cpu" else min(world, hardware.num_devices)


def host_shares(stage: StageMemory) -> Iterator[str]:
    """In words what one rank takes beside its device."""
    named = {
        "optimizer states": stage.host_states,
        "activations": stage.host.get(ACTIVATIONS, 0),
        "rounding of pinned buffers": stage.host.get(ROUNDING, 0),
        "each checkpoint's snapshot": stage.host.get(SNAPSHOT, 0),
    }
    return (f"{format_bytes(size)} of {what}" for what, size in named.items() if size)


def host_warning(plan: Plan, hardware: Hardware, ranks: int, available: int) -> str | None:
    """What to say before a run that is predicted to take more of this host's memory than is free."""
    needed, stage = host_need(plan, hardware, ranks), plan.memory.fullest
    if needed <= available:
        return None
    shares = [*host_shares(stage)]
    if hardware.kind == "cpu":
        shares.insert(0, f"{format_bytes(stage.reserved)} of training")
    several = f", for each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"warning: this run is predicted to need {format_bytes(needed)} of the host's memory "
        f"({', '.join(shares)}{several}), and {format_bytes(available)} of it are free; "
        f"{' or '.join(_mends(stage, hardware, ranks))}."
    )


def _mends(stage: StageMemory, hardware: Hardware, ranks: int) -> Iterator[str]:
    if stage.host_states:
        yield "lower --optimizer-offload-fraction"
    if stage.host.get(ACTIVATIONS):
        yield "lower --cpu-offloading-num-layers"
    if stage.host.get(SNAPSHOT):
        yield "save with --no-async-save"
    if hardware.kind == "cpu":
        yield "run fewer processes" if ranks > 1 else "take a smaller microbatch or model"
