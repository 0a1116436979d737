"""Where in the model and in the step each host event stands, and with it the kernels it launches.

A thread's events nest, so one pass with a stack gives every event its parent; what the marks around it say is
inherited. A backward node has no marks of its own: it takes layer and module from the forward operator that
made it, which the profiler's fwdbwd arrows name.

Forward work inside a backward node is recomputed: an operator there that makes a new autograd node, or a
region that is entered there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from redline.formulas.recorded import operator_flops
from redline.ledger.groups import sends_of
from redline.ledger.marks import read_mark
from redline.ledger.trace import RUNTIME_CATEGORIES, HostEvent, Trace

Phase = Literal["", "forward", "backward", "recompute", "optimizer"]
# PyTorch's attention where no fused one runs: the products and the softmax inside it are attention.
PLAIN_ATTENTION = ("aten::_scaled_dot_product_attention_math",)
NODE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, slots=True)
class Place:
    """Where something ran.

    Attributes:
        phase: "" where nothing says.
        layer: index of the block, None outside the blocks.
        module: "" outside every module.
        host: "data", "logging", "checkpoint" or "evaluation" inside such a region.
        marked: whether any region but the step's is open here.
    """

    phase: Phase = ""
    layer: int | None = None
    module: str = ""
    host: str = ""
    marked: bool = False


NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class Where:
    """Host events of a trace with what surrounds them, index by index.

    Attributes:
        parents: index of the event around each, -1 for none.
        places: of each event, itself included.
        operators: index of the innermost operator at each event, itself included; -1 for none.
        forwards: of an event inside a backward node, the index of the forward operator; -1 otherwise.
        steps: (start, end, number) of the marked steps.
        by_correlation: the runtime call of each correlation.
        wrappers: operators whose FLOPs are those of another inside them (linear around addmm).
        sends: the cause that sends count to whose group is not known.
    """

    events: Sequence[HostEvent]
    parents: list[int]
    places: list[Place]
    operators: list[int]
    forwards: list[int]
    steps: list[tuple[int, int, int]]
    by_correlation: dict[int, int]
    wrappers: frozenset[int]
    sends: str = "pp"


class _Pass:
    """One walk over the host events in order of their start."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.places: list[Place] = []
        self.operators: list[int] = []
        self.forwards: list[int] = []
        self.in_node: list[bool] = []
        self.steps: list[tuple[int, int, int]] = []
        self._makers: dict[tuple[int, int], int] = {}  # (thread, start) of a forward operator -> index
        self._by_sequence: dict[int, int] = {}
        self._interned: dict[Place, Place] = {NOWHERE: NOWHERE}

    def visit(self, index: int, event: HostEvent, parent: int) -> None:
        """Take in one event, its parent (-1 for none) being known."""
        place = self.places[parent] if parent >= 0 else NOWHERE
        in_node = parent >= 0 and self.in_node[parent]
        forward = self.forwards[parent] if parent >= 0 else -1
        operator = self.operators[parent] if parent >= 0 else -1
        if event.category == "cpu_op":
            operator = index
            place, in_node, forward = self._operator(index, event, place, in_node, forward)
        elif event.category not in RUNTIME_CATEGORIES:
            place = self._marked(event, place, in_node)
        self.places.append(self._interned.setdefault(place, place))
        self.in_node.append(in_node)
        self.forwards.append(forward)
        self.operators.append(operator)

    def _operator(
        self, index: int, event: HostEvent, place: Place, in_node: bool, forward: int
    ) -> tuple[Place, bool, int]:
        if event.is_backward or event.name.startswith(NODE):
            forward = self._forward_of(event, forward)
            found = self.places[forward] if forward >= 0 else NOWHERE
            return Place("backward", found.layer, found.module, place.host, True), True, forward
        if event.name in PLAIN_ATTENTION and not place.module:
            place = replace(place, module="core_attention")
        if event.sequence >= 0:
            self._makers[event.thread, event.start] = index
            self._by_sequence[event.sequence] = index
            if in_node and place.phase == "backward":
                place = Place("recompute", place.layer, place.module, place.host, True)
            elif not place.phase:
                place = Place("forward", place.layer, place.module, place.host, place.marked)
        return place, in_node, forward

    def _forward_of(self, event: HostEvent, inherited: int) -> int:
        arrow = self.trace.forward_of.get((event.thread, event.start))
        if arrow is not None and arrow in self._makers:
            return self._makers[arrow]
        # The node's outer span has no arrow; its number finds the operator unless threads share numbers.
        return self._by_sequence.get(event.sequence, inherited)

    def _marked(self, event: HostEvent, place: Place, in_node: bool) -> Place:
        found = read_mark(event.name)
        if found is None:
            return place
        key, value = found
        if key == "step":
            self.steps.append((event.start, event.end, int(value)))
            return place
        phase, layer, module, host = place.phase, place.layer, place.module, place.host
        if key == "phase":
            phase = value  # type: ignore[assignment]
        elif key == "layer":
            layer, module = int(value), ""
        elif key == "module":
            module = value
        elif key == "host":
            host = value
        if key in ("layer", "module"):
            phase = "recompute" if in_node else phase or "forward"
        return Place(phase, layer, module, host, True)


def locate(trace: Trace) -> Where:
    """The place of every host event of `trace`."""
    walk, parents, by_correlation = _Pass(trace), [], {}
    stacks: dict[int, list[int]] = {}
    events = trace.host
    for index, event in enumerate(events):
        stack = stacks.setdefault(event.thread, [])
        while stack and events[stack[-1]].end <= event.start:
            stack.pop()
        parent = stack[-1] if stack else -1
        parents.append(parent)
        walk.visit(index, event, parent)
        stack.append(index)
        if event.correlation:
            by_correlation[event.correlation] = index
    steps = sorted(walk.steps)
    wrappers = _wrappers(events, parents)
    found = walk.places, walk.operators, walk.forwards, steps, by_correlation, wrappers
    return Where(events, parents, *found, sends=sends_of(trace.groups))


def _wrappers(events: Sequence[HostEvent], parents: Sequence[int]) -> frozenset[int]:
    found: set[int] = set()
    for index, event in enumerate(events):
        if event.dims and operator_flops(event.name, event.dims) is not None:
            around = parents[index]
            while around >= 0 and around not in found:
                found.add(around)
                around = parents[around]
    return frozenset(found)
