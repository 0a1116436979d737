"""From a trace to its account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from redline.errors import DataError
from redline.ledger.account import RankAccount, Reference, StepAccount
from redline.ledger.causes import make_losses
from redline.ledger.idle import evidence
from redline.ledger.marks import PREFIX, read_mark
from redline.ledger.places import Where, locate
from redline.ledger.tables import Owned, module_rows, operator_rows, recorded_flops
from redline.ledger.timeline import NOBODY, Layer, cut, layer, nested
from redline.ledger.trace import Trace
from redline.ledger.work import Work, device_work, host_work

LAYERS = ("compute", "copy", "collective")
NS_PER_MS = 1e6
WAKING_NS = 1_000_000
GLOO = "gloo:"  # how torch.distributed names what runs on its CPU threads


def take_account(trace: Trace, reference: Reference) -> StepAccount:
    """The account of one rank's trace.

    Args:
        reference: what is known of the step. Model FLOPs that are not are taken from the shapes of the
            trace's operators, where it has them.

    Raises: DataError when the trace holds no step that takes time.
    """
    where = locate(trace)
    window = _window(trace, where)
    if window.end <= window.start:
        raise DataError(
            f"{trace.source} holds no step that takes time.",
            why="its marks or events end where they begin.",
            mend="profile at least one whole step.",
        )
    owned, host = _device_time(trace, where, window) if trace.device else _host_time(where, window)
    reference = _with_flops(reference, owned, window.count, where)
    time = Counter(host)
    for each in owned:
        time[each.work.cause] += each.time
    return _account(trace, window, reference, time, owned, where)


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is accounted for: `count` steps, numbered where they are marked."""

    start: int
    end: int
    count: int
    numbers: tuple[int, ...]
    thread: int


def _window(trace: Trace, where: Where) -> Window:
    """From the first marked step to the last; without marks, everything that the trace holds.

    Other trainers run ahead of the device, so that their host's marks say little of its time: where the
    profiler carried them over to the device, those count.
    """
    steps = where.steps
    own = any(event.name.startswith(f"{PREFIX}step=") for event in trace.host)
    if not own:
        steps = _steps_on_device(trace) or steps
    thread = _step_thread(where, steps)
    if steps:
        numbers = tuple(number for _, _, number in steps)
        return Window(steps[0][0], max(end for _, end, _ in steps), len(steps), numbers, thread)
    spans = [(event.start, event.end) for event in trace.device]
    spans = spans or [(event.start, event.end) for event in trace.host if event.thread == thread]
    return Window(spans[0][0], max(end for _, end in spans), 1, (), thread)


def _steps_on_device(trace: Trace) -> list[tuple[int, int, int]]:
    """(start, end, number) of the steps that the profiler marked on the device.

    It writes a span for each stream that ran kernels of a step: those of one number are one step.
    """
    spans: dict[int, tuple[int, int]] = {}
    for event in trace.device_marks:
        if (found := read_mark(event.name)) and found[0] == "step":
            number = int(found[1])
            start, end = spans.get(number, (event.start, event.end))
            spans[number] = min(start, event.start), max(end, event.end)
    return sorted((start, end, number) for number, (start, end) in spans.items())


def _step_thread(where: Where, steps: Sequence[tuple[int, int, int]]) -> int:
    """The thread that steps: the one that carries the marks, else the busiest."""
    starts = {start for start, _, _ in steps}
    busy: Counter[int] = Counter()
    for event, parent in zip(where.events, where.parents, strict=True):
        if event.start in starts and (found := read_mark(event.name)) and found[0] == "step":
            return event.thread
        if parent < 0 and event.category == "cpu_op":
            busy[event.thread] += event.end - event.start
    return busy.most_common(1)[0][0] if busy else 0


def _device_time(trace: Trace, where: Where, window: Window) -> tuple[list[Owned], dict[str, int]]:
    """What each kernel, copy and collective owns, and the idle time by cause.

    What ran in the shade of other work is among them: it owns no time, but did what it did.
    """
    work = device_work(trace.device, where)
    layers = [_layer_of(work, name) for name in LAYERS]
    idle = evidence(trace.device, where)
    pieces = cut(window.start, window.end, [*layers, *(found for _, found in idle)])
    owned = [Owned(each, 0) for each in work]
    for index in range(len(LAYERS)):
        times = pieces.owned(index, len(work))
        for at in times.nonzero()[0]:
            owned[at] = Owned(work[at], int(times[at]))
    host = {
        cause: int(pieces.lengths[pieces.layers == len(LAYERS) + at].sum())
        for at, (cause, _) in enumerate(idle)
    }
    host["unknown"] = int(pieces.lengths[pieces.layers == NOBODY].sum())
    ran = [each for each in owned if each.work.start < window.end and each.work.end > window.start]
    return ran, host


def _layer_of(work: Sequence[Work], name: str) -> Layer:
    mine = [index for index, each in enumerate(work) if each.layer == name]
    return layer([work[index].start for index in mine], [work[index].end for index in mine], mine)


def _host_time(where: Where, window: Window) -> tuple[list[Owned], dict[str, int]]:
    """On a CPU an instant belongs to the innermost event of the thread that steps.

    Where that is no operator, and a collective on a thread of gloo's ends meanwhile, it was a wait for it.
    """
    events = where.events
    mine = [index for index, event in enumerate(events) if event.thread == window.thread]
    gloo = [index for index, event in enumerate(events) if event.name.startswith(GLOO)]
    work = host_work([*mine, *gloo], where)
    stack = nested([events[index].start for index in mine], [events[index].end for index in mine])
    works = np.asarray([bool(work[at].layer) for at in stack.owners], bool)
    operators = stack.where(works)
    waits = _waits(operators, [(events[index].start, events[index].end) for index in gloo], len(mine))
    pieces = cut(window.start, window.end, [operators, waits, stack.where(~works)])
    host: Counter[str] = Counter(unknown=int(pieces.lengths[pieces.layers == NOBODY].sum()))
    owned = []
    for index in range(3):
        times = pieces.owned(index, len(work))
        for at in times.nonzero()[0]:
            if work[at].layer:
                owned.append(Owned(work[at], int(times[at])))
            else:
                host[work[at].cause] += int(times[at])
    return owned, dict(host)


def _waits(operators: Layer, spans: Sequence[tuple[int, int]], first: int) -> Layer:
    """Where the stepping thread waited for spans of another, numbered from `first`: the gap each ends in.

    The other thread notes its end after it has woken who waits, so a gap that ends a little before counts.
    """
    starts, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
    owners = np.arange(first, first + len(spans))
    early = np.maximum(starts, ends - np.maximum(WAKING_NS, (ends - starts) // 20))
    never = np.iinfo(np.int64).max
    begun = np.append(operators.starts, never)
    over = np.append(operators.ends, -never)  # [-1]: before the first operator nothing has been over
    gaps = []
    for probe in (early, ends):
        at = np.searchsorted(operators.starts, probe, side="right") - 1
        begin, end = np.maximum(over[at], starts), np.minimum(begun[at + 1], ends)
        gaps.append((np.where(over[at] > probe, end, begin), end))
    return layer(
        np.concatenate([begin for begin, _ in gaps]),
        np.concatenate([end for _, end in gaps]),
        np.concatenate([owners, owners]),
    )


def _with_flops(reference: Reference, owned: Sequence[Owned], count: int, where: Where) -> Reference:
    if reference.model_flops is not None:
        return reference
    total, attention = recorded_flops(owned, where)
    if not total:
        return reference
    return replace(
        reference, model_flops=total / count, attention_flops=attention / count, flops_source="shapes"
    )


def _account(
    trace: Trace,
    window: Window,
    reference: Reference,
    time: Mapping[str, int],
    owned: Sequence[Owned],
    where: Where,
) -> StepAccount:
    wall_ms = (window.end - window.start) / NS_PER_MS / window.count
    ms = {cause: spent / NS_PER_MS / window.count for cause, spent in time.items()}
    ideal_ms = _take_ideal(ms, reference)
    losses = make_losses(ms, wall_ms, ideal_known=ideal_ms is not None)
    mfu = None if ideal_ms is None else ideal_ms / wall_ms
    rank = RankAccount(
        rank=trace.rank, wall_ms=wall_ms, ideal_ms=ideal_ms, mfu=mfu, losses=losses, source=trace.source
    )
    return StepAccount(
        reference=reference,
        steps=window.numbers,
        wall_ms=wall_ms,
        ideal_ms=ideal_ms,
        mfu=mfu,
        losses=losses,
        operators=operator_rows(owned, where, window.count, reference),
        modules=module_rows(owned, where, window.count),
        ranks=(rank,),
    )


def _take_ideal(ms: dict[str, float], reference: Reference) -> float | None:
    """The time of the model's FLOPs at peak, taken out of `ms` where it was spent; None if unknown."""
    if reference.model_flops is None or reference.peak_flops_per_s is None:
        return None
    per_flop = 1e3 / reference.peak_flops_per_s
    ideal = reference.model_flops * per_flop
    attention = (reference.attention_flops or 0.0) * per_flop if ms.get("attention") else 0.0
    ms["attention"] = ms.get("attention", 0.0) - attention
    ms["gemm"] = ms.get("gemm", 0.0) - (ideal - attention)
    return ideal
