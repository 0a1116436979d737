"""Peak memory of training on one process: what is always held, plus the worst moment of a step.

A step passes moments that can be the peak. Each holds all saved activations (or all but the parts behind
it), and a workspace of its own:
    loss        after the whole forward: logits, log probabilities and their gradients
    mlp         the last layer's MLP, forward or backward
    attention   the last layer's attention, forward or backward
    reduction   after the backward, where half-precision gradients are summed in fp32: all that ranks sent
    optimizer   no activations, only the update's scratch
The estimate counts what a caching allocator hands out, not what it keeps in reserve: fragmentation and the
device's own context are separate lines that do not enter `total`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from redline.formulas.activations import (
    Held,
    MicrobatchShape,
    rebuilt_by_layer,
    saved_by_embedding,
    saved_by_head,
    saved_by_layer,
    saved_in_layers,
    shared_stream,
    total_bytes,
    unit_input,
)
from redline.formulas.buckets import ALIGNMENT
from redline.formulas.host import (
    ACTIVATIONS,
    ROUNDING,
    SNAPSHOT,
    STATES,
    pinned_rounding,
    snapshot_bytes,
    snapshot_rounding,
)
from redline.formulas.params import stored_elements
from redline.formulas.recompute import NOTHING
from redline.formulas.saved import by_module
from redline.formulas.shape import ModelShape
from redline.formulas.state import ITEM_BYTES, StateDtypes, away_bytes, stage_bytes, state_bytes
from redline.formulas.tp_traffic import peer_areas, pushed_turn_bytes
from redline.formulas.workspace import attention_workspace, loss_workspace, mlp_workspace
from redline.units import MIB

Moment = tuple[tuple[Held, ...], tuple[Held, ...]]  # what is saved, and what is there for a moment
Part = Literal["mlp", "attention"]
OPTIMIZER_CHUNK = 1 << 24  # elements staged by the optimizer for each state of another dtype
CODING_BYTES = 32  # an element staged: what PyTorch's operators make while they round moments to 8 or 16 bits
# Measured on an H200 with torch 2.11 over eleven models, dtypes and backends.
LIBRARY_WORKSPACE = {"cpu": 0, "cuda": 64 * MIB}  # cuBLAS and cuBLASLt; less before Hopper
CONTEXT = {"cpu": 0, "cuda": 768 * MIB}  # CUDA context and kernels, outside the allocator
FRAGMENTATION = {"cpu": 0.0, "cuda": 0.11}  # kept beside activations and workspace: 5 to 14 % of them


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """One pipeline stage on one rank, in bytes.

    Attributes:
        state: always held, by tensor class.
        activations: saved for backward at the peak, by part of the model.
        workspace: needed for a moment at the peak, by what it is.
        peak_at: the moment of the peak, by its name above.
        moments: bytes of every moment, state included; "forward": when it has ended, never more than "loss".
        saved: for backward when a forward has ended, by module (formulas/saved.py), wherever it lies.
        fragmentation, context: expected on top; not part of `total`.
        beside: memory of the device that PyTorch's allocator neither hands out nor counts; on top as well.
        host: in host memory, by what it is (formulas/host.py); not part of `total` either.
    """

    state: Mapping[str, int]
    activations: Mapping[str, int]
    workspace: Mapping[str, int]
    peak_at: str
    moments: Mapping[str, int]
    fragmentation: int
    context: int
    saved: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """Every line that adds up to `total`."""
        saved = {f"activations_{name}": size for name, size in self.activations.items()}
        passing = {f"workspace_{name}": size for name, size in self.workspace.items()}
        return {**self.state, **saved, **passing}

    @property
    def total(self) -> int:
        """Bytes allocated at the peak."""
        return sum(self.parts.values())

    @property
    def host_states(self) -> int:
        """Bytes of optimizer states in host memory."""
        return sum(self.host.get(name, 0) for name in STATES)

    @property
    def host_total(self) -> int:
        """Bytes in host memory."""
        return sum(self.host.values())

    @property
    def reserved(self) -> int:
        """What the device should have free: the peak with fragmentation, context and what lies beside."""
        return self.total + self.fragmentation + self.context + sum(self.beside.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "total": self.total,
            "peak_at": self.peak_at,
            "parts": self.parts,
            "moments": dict(self.moments),
            "saved": dict(self.saved),
            "fragmentation": self.fragmentation,
            "context": self.context,
            "beside": dict(self.beside),
            "reserved": self.reserved,
            "host": dict(self.host),
        }


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Predicted peak of every pipeline stage; one stage without pipeline parallelism."""

    stages: tuple[StageMemory, ...]

    @property
    def fullest(self) -> StageMemory:
        """The stage that decides whether it fits."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def total(self) -> int:
        """Bytes allocated at the peak of the fullest stage."""
        return self.fullest.total

    @property
    def reserved(self) -> int:
        """What each device should have free."""
        return max(stage.reserved for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: those of the fullest stage, and all stages."""
        return self.fullest.as_dict() | {"stages": [stage.as_dict() for stage in self.stages]}


def training_memory(shape: ModelShape, run: MicrobatchShape, dtypes: StateDtypes) -> MemoryEstimate:
    """Predicted peak memory of training `shape` on one rank.

    Args:
        run: the microbatch and what runs it.
        dtypes: of parameters, gradients and optimizer state.
    """
    elements = stored_elements(shape, ALIGNMENT, run.tp)
    state, host = state_bytes(elements, dtypes), dict[str, int]()
    if dtypes.away:
        if run.device == "cuda":  # a CPU's own memory is the host's
            host = away_bytes(elements, dtypes)
        state = {name: size - host.get(name, 0) for name, size in state.items()}
        state["optimizer_stages"] = stage_bytes(elements, dtypes)
    rounding = snapshot_rounding(shape, run.tp, dtypes) if run.device == "cuda" else 0
    shape = of_rank(shape, run.tp)
    if run.offload_layers and run.device == "cuda":
        sizes = [held.num_bytes for held in offloaded(shape, run)]
        host[ACTIVATIONS] = sum(sizes)
        rounding += pinned_rounding(sizes)
    if snapshot := snapshot_bytes(elements, dtypes):
        host[SNAPSHOT] = snapshot
    if rounding:
        host[ROUNDING] = rounding
    if run.fp8_stored:
        state["weights"] -= (ITEM_BYTES[dtypes.param] - 1) * run.fp8_weights
    copies = run.fp8_weights * (run.fp8_copies - run.fp8_stored) + 2 * run.fp8_head
    if copies:
        state["fp8_copies"] = copies
    embedding, head = saved_by_embedding(shape, run), saved_by_head(shape, run)
    mlp, attention = (_worst(_backward(shape, run, part)) for part in ("mlp", "attention"))
    moments: dict[str, Moment] = {
        "loss": (embedding + saved_by_layers(shape, run) + head, loss_workspace(shape, run)),
        "mlp": (embedding + mlp[0], mlp[1]),
        "attention": (embedding + attention[0], attention[1]),
        "optimizer": ((), (Held("head", "optimizer", "staging", _optimizer_scratch(elements, dtypes, run)),)),
        "forward": (embedding + saved_by_layers(shape, run) + head, ()),
    }
    if dtypes.wide_sum and ITEM_BYTES[dtypes.grad] < ITEM_BYTES["fp32"]:
        received = elements * ITEM_BYTES[dtypes.grad]
        moments["reduction"] = ((), (Held("head", "reduction", "received gradients", received),))
    on_gpu = run.device == "cuda"
    beside = peer_areas(pushed_turn_bytes(shape, run), run.tp, run.joined) if on_gpu else {}
    library = LIBRARY_WORKSPACE[run.device]
    held = sum(state.values()) + library
    at = {name: held + total_bytes(saved + passing) for name, (saved, passing) in moments.items()}
    peak = max(at, key=lambda name: at[name])
    saved, passing = moments[peak]
    moving = total_bytes(saved + passing)
    stage = StageMemory(
        state=MappingProxyType(state),
        activations=MappingProxyType(_sum_by(saved, lambda each: each.part)),
        workspace=MappingProxyType({peak: total_bytes(passing), "library": library}),
        peak_at=peak,
        moments=MappingProxyType(at),
        fragmentation=round(FRAGMENTATION[run.device] * moving),
        context=CONTEXT[run.device],
        saved=MappingProxyType(by_module(_saved(shape, run))),
        beside=MappingProxyType(beside),
        host=MappingProxyType(host),
    )
    return MemoryEstimate((stage,))


def of_rank(shape: ModelShape, tp: int) -> ModelShape:
    """The part of a model that one of `tp` tensor-parallel ranks runs, its share of the vocabulary too."""
    if tp == 1:
        return shape
    rows = shape.padded_vocab_size // tp
    part = shape.of_rank(tp)
    return replace(part, padded_vocab_size=rows, vocab_size=min(shape.vocab_size, rows))


def saved_by_layers(shape: ModelShape, run: MicrobatchShape, last: int | None = None) -> tuple[Held, ...]:
    """What all layers keep at the end of forward: inputs of recomputed units, and the layers behind them.

    Of offloaded ones the device holds what travels: two of them at most.

    Args:
        last: count up to this unit or layer only; None: all.
    """
    stretches = _stretches(shape, run)[:last]
    away = [kept for start, kept in stretches if start < run.offload_layers]
    here = [kept for start, kept in stretches if start >= run.offload_layers]
    travelling = away[-(2 - len(here)) :] if len(here) < 2 else []
    return tuple(held for kept in (*travelling, *here) for held in kept)


def offloaded(shape: ModelShape, run: MicrobatchShape) -> list[Held]:
    """What the first `run.offload_layers` layers of one rank keep in host memory when forward has ended."""
    return [held for start, kept in _stretches(shape, run) if start < run.offload_layers for held in kept]


def _stretches(shape: ModelShape, run: MicrobatchShape) -> list[tuple[int, tuple[Held, ...]]]:
    """The first layer of each recomputed unit with its input, then each other layer with all it keeps."""
    units = run.recompute.units(shape.num_layers)
    covered = units[-1].stop if units else 0
    inputs = [(unit.start, (unit_input(shape, run),)) for unit in units]
    rest = range(covered, shape.num_layers)
    return [*inputs, *zip(rest, saved_in_layers(shape, run, rest), strict=True)]


def _backward(shape: ModelShape, run: MicrobatchShape, part: Part) -> Iterator[Moment]:
    """The moments of backward at which `part` of a layer could be the peak.

    They are the last layer in no unit, the last unit, and the last unit of full length; where some GEMMs run
    in fp8 and others do not, the last of each kind.
    """
    units, plain = run.recompute.units(shape.num_layers), replace(run, recompute=NOTHING)
    covered = units[-1].stop if units else 0
    drops = run.recompute.drops
    for layer in _last_of_each(
        {index: run.parts_in_fp8(index) for index in range(covered, shape.num_layers)}
    ):
        own = run.of_layer(layer)
        rebuilt = tuple(held for held in rebuilt_by_layer(shape, own) if held.part == part)
        saved = saved_by_layers(shape, run, len(units) + layer - covered + 1)
        kept = _up_to(saved, saved_by_layer(shape, own), part)
        yield kept, rebuilt + _workspace(shape, own, part, again=drops("mlp") or drops("activation"))
    kinds = {index: tuple(map(run.parts_in_fp8, unit)) for index, unit in enumerate(units)}
    for index in _last_of_each(kinds):
        inputs = saved_by_layers(shape, run, index + 1)
        twice = Held("attention", "unit", "input, kept once", -shared_stream(shape, run))
        gathered = run.rows * shape.hidden * run.item if run.recompute.spread else 0
        whole = Held("attention", "unit", "input, gathered", gathered)
        layers = saved_in_layers(shape, plain, units[index])
        kept = _up_to(tuple(held for layer in layers for held in layer), layers[-1], part)
        own = plain.of_layer(units[index][-1])
        yield (*inputs, whole, twice, *kept), _workspace(shape, own, part, again=True)


def _last_of_each(kinds: Mapping[int, Hashable]) -> list[int]:
    """Of places by kind, in order, the last place of each kind."""
    return list({kind: place for place, kind in kinds.items()}.values())


def _workspace(shape: ModelShape, run: MicrobatchShape, part: Part, *, again: bool) -> tuple[Held, ...]:
    return mlp_workspace(shape, run, again) if part == "mlp" else attention_workspace(shape, run)


def _up_to(saved: tuple[Held, ...], layer: tuple[Held, ...], part: Part) -> tuple[Held, ...]:
    """`saved`, without the MLP of its last layer where backward has come to that layer's attention."""
    if part == "mlp":
        return saved
    return saved[: len(saved) - len(layer)] + tuple(held for held in layer if held.part == "attention")


def _worst(moments: Iterator[Moment]) -> Moment:
    return max(moments, key=lambda moment: total_bytes((*moment[0], *moment[1])))


def activation_table(shape: ModelShape, run: MicrobatchShape) -> tuple[tuple[int, Held], ...]:
    """Every saved tensor with how often it is saved: once a layer, or once."""
    return _saved(of_rank(shape, run.tp), run)


def _saved(shape: ModelShape, run: MicrobatchShape) -> tuple[tuple[int, Held], ...]:
    """`activation_table` of one rank's part of a model."""
    once = [(1, held) for held in saved_by_embedding(shape, run)]
    units = run.recompute.units(shape.num_layers)
    plain = range(units[-1].stop if units else 0, shape.num_layers)
    layers = [(len(units), unit_input(shape, run))]
    for held, times in Counter(saved_in_layers(shape, run, plain)).items():
        layers += [(times, each) for each in held]
    return (*once, *(line for line in layers if line[0]), *((1, held) for held in saved_by_head(shape, run)))


def _optimizer_scratch(stored: int, dtypes: StateDtypes, run: MicrobatchShape) -> int:
    """Scratch in the main dtype for each state that is stored in another one; the fused update needs none."""
    if "adamw" in run.fused:
        return 0
    staged = [dtype for dtype in (dtypes.grad, dtypes.exp_avg, dtypes.exp_avg_sq) if dtype != dtypes.main]
    coding = CODING_BYTES * bool({dtypes.exp_avg, dtypes.exp_avg_sq} & {"bf16", "fp8"})
    staged += ["remainder"] * dtypes.remainder
    return min(OPTIMIZER_CHUNK, stored) * (len(staged) * ITEM_BYTES[dtypes.main] + coding)


def _sum_by(held: tuple[Held, ...], key: Any) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in held:
        sums[key(each)] = sums.get(key(each), 0) + each.num_bytes
    return sums
