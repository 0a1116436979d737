"""The tables of an account: operators against their limits, and modules by layer and phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from redline.ledger.account import ModuleRow, OperatorRow, Reference
from redline.ledger.places import Where
from redline.ledger.work import Work, cost_of

MOST_ROWS = 150
LONGEST_NAME = 100
NS_PER_MS = 1e6
# Kernels of the optimizer, and the bytes of a step that the reference states for each.
STATED_BYTES = {"_adamw_kernel": "update_bytes", "_piece_kernel": "norm_bytes"}


@dataclass(frozen=True, slots=True)
class Owned:
    """Work of the window and the nanoseconds that are its own: none where other work covers it."""

    work: Work
    time: int


@dataclass(slots=True)
class _Costs:
    """FLOPs and bytes of calls, each counted once."""

    calls: set[int] = field(default_factory=set)
    flops: float = 0.0
    num_bytes: float = 0.0

    def add(self, call: int, where: Where) -> None:
        if call not in self.calls:
            self.calls.add(call)
            flops, num_bytes = cost_of(call, where)
            self.flops += flops or 0.0
            self.num_bytes += num_bytes or 0.0


@dataclass(slots=True)
class _Sum:
    """What the work of one row adds up to.

    Attributes:
        costs: of all its calls.
        timed: of those that own time; only these make rates, which the others would raise above any peak.
    """

    time: int = 0
    calls: set[int] = field(default_factory=set)
    kernels: int = 0
    costs: _Costs = field(default_factory=_Costs)
    timed: _Costs = field(default_factory=_Costs)

    def add(self, each: Owned, where: Where) -> None:
        self.time += each.time
        call = each.work.call
        if call < 0:
            self.kernels += 1
            return
        self.calls.add(call)
        if each.work.aside:
            return
        self.costs.add(call, where)
        if each.time:
            self.timed.add(call, where)

    @property
    def count(self) -> int:
        return len(self.calls) + self.kernels


def recorded_flops(owned: Iterable[Owned], where: Where) -> tuple[float, float]:
    """(all, attention's) FLOPs of the products in `owned`, recomputed ones and evaluations left out."""
    total = attention = 0.0
    seen: set[int] = set()
    for each in owned:
        work = each.work
        if work.call in seen or work.call < 0 or work.cause not in ("gemm", "attention"):
            continue
        seen.add(work.call)
        flops = cost_of(work.call, where)[0] or 0.0
        total += flops
        attention += flops if work.cause == "attention" else 0.0
    return total, attention


def operator_rows(
    owned: Sequence[Owned], where: Where, count: int, reference: Reference
) -> tuple[OperatorRow, ...]:
    """A row an operator, phase and role, by time, the longest first; the tail is one row."""
    sums: dict[tuple[str, str, str, str], _Sum] = {}
    for each in owned:
        work = each.work
        key = ((work.operator or work.name)[:LONGEST_NAME], work.kind, work.place.phase, work.role)
        sums.setdefault(key, _Sum()).add(each, where)
    ordered = sorted(sums.items(), key=lambda item: -item[1].time)
    rows = [_operator_row(key, found, count, reference) for key, found in ordered[:MOST_ROWS]]
    if rest := ordered[MOST_ROWS:]:
        ms = sum(found.time for _, found in rest) / NS_PER_MS / count
        calls = sum(found.count for _, found in rest) / count
        rows.append(
            OperatorRow(name=f"{len(rest)} more", kind="other", phase="", role="", calls=calls, ms=ms)
        )
    return tuple(rows)


def _operator_row(
    key: tuple[str, str, str, str], found: _Sum, count: int, reference: Reference
) -> OperatorRow:
    name, kind, phase, role = key
    num_bytes, timed_bytes = found.costs.num_bytes / count or None, found.timed.num_bytes / count
    if name in STATED_BYTES:
        num_bytes = getattr(reference, STATED_BYTES[name])
        timed_bytes = num_bytes or 0.0
    seconds = found.time / 1e9 / count
    flops_per_s = found.timed.flops / count / seconds if found.timed.flops else None
    bytes_per_s = timed_bytes / seconds if timed_bytes and seconds else None
    peak, bandwidth = reference.peak_flops_per_s, reference.bandwidth_bytes_per_s
    of_peak = flops_per_s / peak if flops_per_s and peak else None
    of_bandwidth = bytes_per_s / bandwidth if bytes_per_s and bandwidth else None
    return OperatorRow(
        name=name,
        kind=kind,
        phase=phase,
        role=role,
        calls=found.count / count,
        ms=seconds * 1e3,
        flops=found.costs.flops / count or None,
        bytes=num_bytes,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        of_peak=of_peak,
        of_bandwidth=of_bandwidth,
        limit=_limit(of_peak, of_bandwidth),
    )


def _limit(of_peak: float | None, of_bandwidth: float | None) -> str:
    if of_peak is None and of_bandwidth is None:
        return ""
    return "compute" if (of_peak or 0.0) >= (of_bandwidth or 0.0) else "memory"


def module_rows(owned: Sequence[Owned], where: Where, count: int) -> tuple[ModuleRow, ...]:
    """A row a module, layer and phase: outside the blocks first, then by layer."""
    sums: dict[tuple[int, str, str], _Sum] = {}
    for each in owned:
        place = each.work.place
        layer = -1 if place.layer is None else place.layer
        sums.setdefault((layer, place.module, place.phase), _Sum()).add(each, where)
    return tuple(
        ModuleRow(
            phase=phase,
            layer=None if layer < 0 else layer,
            module=module,
            calls=found.count / count,
            ms=found.time / NS_PER_MS / count,
            flops=found.costs.flops / count or None,
        )
        for (layer, module, phase), found in sorted(sums.items())
    )
