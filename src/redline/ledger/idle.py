"""Why a device was idle: evidence from the host threads that feed it, strongest first.

A region in which the host waits for data, saves, evaluates or logs; a call that allocates or frees device
memory; a wait for the device, and the gaps after it until the host is ahead again; work of the host on its
way to the next launch (an operator, a runtime call, an open region), or a launch under way. What has no
evidence stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from redline.ledger.causes import HOST_REGIONS
from redline.ledger.kinds import runtime_call
from redline.ledger.places import Where
from redline.ledger.timeline import Layer, union
from redline.ledger.trace import RUNTIME_CATEGORIES, DeviceEvent, HostEvent


@dataclass(slots=True)
class _Spans:
    starts: list[int]
    ends: list[int]

    def add(self, start: int, end: int) -> None:
        self.starts.append(start)
        self.ends.append(end)


def evidence(device: Sequence[DeviceEvent], where: Where) -> list[tuple[str, Layer]]:
    """(cause, when it held) in order of precedence, from the threads that launch work."""
    events = where.events
    feeders = {events[index].thread for index in where.by_correlation.values()}
    feeders |= {event.thread for event, place in zip(events, where.places, strict=True) if place.host}
    spans = {cause: _Spans([], []) for cause in (*HOST_REGIONS, "allocator", "synchronisation", "launch")}
    for index, event in enumerate(events):
        if event.thread in feeders and (cause := _cause(index, event, where)):
            spans[cause].add(event.start, event.end)
    for start, end in _after_waits(device, where):
        spans["synchronisation"].add(start, end)
    for work in device:
        launch = where.by_correlation.get(work.correlation, -1)
        if launch >= 0 and events[launch].start < work.start:
            spans["launch"].add(events[launch].start, work.start)
    return [(cause, union(found.starts, found.ends)) for cause, found in spans.items()]


def _cause(index: int, event: HostEvent, where: Where) -> str:
    place = where.places[index]
    if event.category in RUNTIME_CATEGORIES:
        call = runtime_call(event.name)
        return {"allocation": "allocator", "synchronisation": "synchronisation"}.get(call, "launch")
    if place.host:
        return place.host if place.host in HOST_REGIONS else ""
    return "launch" if event.category == "cpu_op" or place.marked else ""


def _after_waits(device: Sequence[DeviceEvent], where: Where) -> Iterator[tuple[int, int]]:
    """The gaps on the device that a wait for it has caused.

    A wait drains the queue, and the host starts again from nothing. The gap in which the wait ends is its
    doing, and so are those that follow until a launch finds the device still busy: from there on the host is
    ahead, and a further gap has another reason.
    """
    events = where.events
    waits: dict[int, list[int]] = {}
    for event in events:
        if event.category in RUNTIME_CATEGORIES and runtime_call(event.name) == "synchronisation":
            waits.setdefault(event.thread, []).append(event.end)
    ends = {thread: np.sort(np.asarray(found, np.int64)) for thread, found in waits.items()}
    busy_until, behind_since = 0, -1  # the end of the last wait that the host has not made up for
    for work in device:
        launch = where.by_correlation.get(work.correlation, -1)
        if launch >= 0:
            call = events[launch]
            found = ends.get(call.thread)
            at = -1 if found is None else int(np.searchsorted(found, call.start, side="right")) - 1
            wait = -1 if found is None or at < 0 else int(found[at])
            if call.end < busy_until:
                behind_since = -1
            elif wait >= busy_until:
                behind_since = wait
        if busy_until and behind_since >= 0 and work.start > busy_until:
            yield busy_until, work.start
        busy_until = max(busy_until, work.end)
