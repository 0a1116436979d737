"""The work of a trace: what ran on the device (on a CPU: in operators), of what kind, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redline.formulas.recorded import gemm_sizes, moves_nothing, operator_bytes, operator_flops
from redline.ledger.causes import cause_of_work
from redline.ledger.groups import group_of
from redline.ledger.kinds import Kind, kind_of, operator_kind
from redline.ledger.places import NOWHERE, Place, Where
from redline.ledger.trace import COPY, FILL, DeviceEvent, HostEvent

COLLECTIVE_NOTE = "record_param_comms"
PEERS = "ptop"  # CUPTI's word for copies from one device to another: what pushed GEMMs send by
ON_DEVICE = ("dtod", "device -> device", "device to device")


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, copy or operator.

    Attributes:
        layer: "compute", "copy", "collective", or "" for what a CPU's host does between operators.
        cause: key of CAUSES that its time counts to.
        call: index of the host operator it belongs to, -1 for none; several kernels may share one.
    """

    start: int
    end: int
    name: str
    operator: str
    kind: Kind
    place: Place
    layer: str
    cause: str
    role: str
    call: int

    @property
    def aside(self) -> bool:
        """Whether it only prepares what its operator does: a product's workspace set to zero, or a copy."""
        return self.kind == "copy" and operator_kind(self.operator) in ("gemm", "attention")


class Roles:
    """Which of a layer's three products a GEMM is: fprop, dgrad or wgrad.

    In backward the sizes tell: a weight's gradient sums over the tokens, an input's over the features. Where
    both are as many, the first product of a node is dgrad and the next wgrad, which is PyTorch's order.
    """

    def __init__(self, where: Where) -> None:
        self._where = where
        self._of_call: dict[int, str] = {}
        self._products: dict[int, int] = {}  # backward node -> how many it has run

    def of(self, call: int, place: Place) -> str:
        """The role of the GEMM that operator `call` runs, "" for none that can be told."""
        if call < 0:
            return ""
        if call not in self._of_call:
            self._of_call[call] = self._find(call, place)
        return self._of_call[call]

    def _find(self, call: int, place: Place) -> str:
        event = self._where.events[call]
        sizes = gemm_sizes(event.name, event.dims)
        if place.phase != "backward":
            return "fprop" if sizes is None or sizes[0] == 1 else ""
        if sizes is not None and sizes[0] != 1:
            return ""  # batched: attention's products have no weight
        node = self._node(call)
        order = self._products.get(node, 0)
        self._products[node] = order + 1
        tokens = self._tokens(self._where.forwards[call])
        if sizes is not None and tokens:
            _, m, _, k = sizes
            if (k == tokens) != (m == tokens):
                return "wgrad" if k == tokens else "dgrad"
        return "dgrad" if order == 0 else "wgrad"

    def _node(self, call: int) -> int:
        """The backward node around an operator."""
        while call >= 0 and not self._where.events[call].is_backward:
            call = self._where.parents[call]
        return call

    def _tokens(self, forward: int) -> int:
        """Rows of the input that the forward operator multiplied."""
        if forward < 0:
            return 0
        matrices = [dims for dims in self._where.events[forward].dims if len(dims) >= 2]
        if not matrices or not all(isinstance(size, int) for size in matrices[0]):
            return 0
        rows = 1
        for size in matrices[0][:-1]:
            rows *= size
        return rows


def device_work(device: Sequence[DeviceEvent], where: Where) -> list[Work]:
    """What ran on the device, in its order, each with the operator that launched it."""
    roles, found = Roles(where), []
    for event in device:
        launch = where.by_correlation.get(event.correlation, -1) if event.correlation else -1
        call = where.operators[launch] if launch >= 0 else -1
        place = where.places[launch] if launch >= 0 else NOWHERE
        operator = _operator_name(where.events[call], event) if call >= 0 else ""
        kind, layer, cause = _classify(event, operator, place, where, call)
        role = roles.of(call, place) if kind == "gemm" and layer == "compute" else ""
        found.append(
            Work(event.start, event.end, event.name, operator, kind, place, layer, cause, role, call)
        )
    return found


def _operator_name(operator: HostEvent, event: DeviceEvent) -> str:
    """An operator as people know it: the profiler's note of a collective is named by what it notes."""
    facts = operator.collective or event.collective or {}
    if operator.name == COLLECTIVE_NOTE and "Collective name" in facts:
        return f"nccl:{facts['Collective name']}"
    return operator.name


def _classify(
    event: DeviceEvent, operator: str, place: Place, where: Where, call: int
) -> tuple[Kind, str, str]:
    if event.category == COPY and PEERS in event.name.lower():
        return "collective", "collective", "collective"
    if event.category == COPY and not any(word in event.name.lower() for word in ON_DEVICE):
        offload = "offload" in place.module
        return "copy", "copy", "offload" if offload else place.host if place.host == "data" else "copies"
    if event.category in (COPY, FILL):
        return "copy", "compute", cause_of_work("copy", place)
    kind = _kind_at(place, operator) or kind_of(event.name, operator)
    if kind == "collective":
        return kind, "collective", _group(event, where, call)
    return kind, "compute", cause_of_work(kind, place)


def _kind_at(place: Place, operator: str) -> Kind | None:
    """What only the place tells: a norm of vectors outside forward and backward is that of the gradients."""
    return "optimizer" if not place.phase and operator.endswith("vector_norm") else None


def _group(event: DeviceEvent, where: Where, call: int) -> str:
    """The group of a collective: the kernel's own record, else that of an operator around its launch."""
    facts = event.collective
    while facts is None and call >= 0:
        facts = where.events[call].collective
        call = where.parents[call]
    facts = facts or {}
    words = " ".join(str(facts.get(key, "")) for key in ("Process Group Description", "Process Group Name"))
    return group_of(words, str(facts.get("Collective name", event.name)), where.sends)


def host_work(indices: Sequence[int], where: Where) -> list[Work]:
    """What one thread of a CPU did, event by event: there the operators are the work.

    The time that an event owns itself (nothing inside it running) is compute where it is an operator of a
    library, and the host's where it is a region, an autograd node or a Function written in Python.
    """
    roles, found = Roles(where), []
    for index in indices:
        event, place, call = where.events[index], where.places[index], where.operators[index]
        kind = _kind_at(place, event.name) or operator_kind(event.name)
        operator = event.name if event.category == "cpu_op" else ""
        layer, cause = _host_cause(event, kind, place, where.sends)
        role = roles.of(call, place) if kind == "gemm" and layer == "compute" else ""
        kind = kind or "other"
        found.append(
            Work(event.start, event.end, event.name, operator, kind, place, layer, cause, role, call)
        )
    return found


def _host_cause(event: HostEvent, kind: Kind | None, place: Place, sends: str) -> tuple[str, str]:
    if place.host:
        return "", place.host
    if kind == "collective":
        facts = event.collective or {}
        words = str(facts.get("Process Group Description", ""))
        return "collective", group_of(words, event.name, sends)
    library = event.category == "cpu_op" and "::" in event.name and "autograd::" not in event.name
    if library and not moves_nothing(event.name):
        return "compute", cause_of_work(kind or "other", place)
    return "", "launch" if place.marked or event.category == "cpu_op" else "unknown"


def cost_of(call: int, where: Where) -> tuple[float | None, float | None]:
    """(FLOPs, bytes) of one call of an operator, None where its shapes do not say."""
    if call < 0:
        return None, None
    event = where.events[call]
    flops = None if call in where.wrappers else operator_flops(event.name, event.dims)
    return flops, operator_bytes(event.name, event.dims, event.types)
