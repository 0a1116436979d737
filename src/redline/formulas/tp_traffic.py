"""What tensor parallelism sends: every collective of a microbatch and of a step, and the buffers it needs.

Without sequence parallelism the sum of a row GEMM is an all-reduce, and so is that of a column GEMM's input
gradient. With it each becomes a reduce-scatter of the same tensor beside an all-gather; a column GEMM's input
is gathered once more for its weight gradient, because only this rank's part of it is kept. A GEMM in fp8
keeps what was gathered; with `--tp-comm-overlap` its part, and what is gathered for it is a byte a value.

Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from redline.formulas.activations import COLUMNS, ROWS, Joined, MicrobatchShape
from redline.formulas.shape import ModelShape
from redline.formulas.state import ITEM_BYTES
from redline.formulas.traffic import Collective, sent_bytes

NORM_BYTES = 8  # the squared gradient norm, in float64
TURNS = 4  # in which an area is used that peers write (comm/pushed.py)
AMAX_BYTES = 4  # a largest value, in fp32


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective: where it stands, how often, and the bytes of its tensor when whole."""

    where: str
    kind: Collective
    times: int
    num_bytes: int

    def by_rank(self, tp: int) -> float:
        """Bytes each rank sends."""
        return self.times * sent_bytes(self.kind, self.num_bytes, tp)


def tp_of_microbatch(shape: ModelShape, run: MicrobatchShape, *, sequence: bool) -> tuple[Sent, ...]:
    """The collectives of one microbatch, forward and backward, and what recompute repeats of them.

    The loss without logits sends its statistics once a chunk of tokens: more collectives of the same bytes.
    """
    L, T = shape.num_layers, run.tokens
    hidden, number = T * shape.hidden * run.item, T * run.wide
    if sequence:
        between = [
            Sent("embedding, forward", "reduce_scatter", 1, hidden),
            Sent("embedding, backward", "all_gather", 1, hidden),
            *_gathers("qkv and fc1, forward", COLUMNS, range(L), shape, run),
            Sent("proj and fc2, forward", "reduce_scatter", 2 * L, hidden),
            *_gathers("proj and fc2, backward", ROWS, range(L), shape, run),
            *_gathered_again(shape, run),
            Sent("qkv and fc1, backward", "reduce_scatter", 2 * L, hidden),
            Sent("head, forward", "all_gather", 1, hidden),
            Sent("head, backward", "reduce_scatter", 1, hidden),
        ]
    else:
        between = [
            Sent("embedding, forward", "all_reduce", 1, hidden),
            Sent("proj and fc2, forward", "all_reduce", 2 * L, hidden),
            Sent("qkv and fc1, backward", "all_reduce", 2 * L, hidden),
            Sent("head, backward", "all_reduce", 1, hidden),
        ]
    return (
        *between,
        *_again(shape, run, hidden, sequence=sequence),
        Sent("loss, maximum", "all_reduce", 1, number),
        Sent("loss, sums", "all_reduce", 1, 3 * number),
    )


def _gathers(
    where: str, parts: Sequence[str], layers: Iterable[int], shape: ModelShape, run: MicrobatchShape
) -> Iterator[Sent]:
    """The rows of one operand of these GEMMs of a layer; in fp8, where they travel so, with their scale."""
    names = _names(parts, layers)
    in_fp8 = len(run.fp8_sites.intersection(names)) if run.fp8_linked else 0
    values = run.tokens * shape.hidden
    yield Sent(where, "all_gather", len(names) - in_fp8, values * run.item)
    yield Sent(f"{where}, in fp8", "all_gather", in_fp8, values)
    yield Sent(f"{where}, largest values", "all_reduce", in_fp8 * run.fp8_measures, AMAX_BYTES)


def _names(parts: Sequence[str], layers: Iterable[int]) -> list[str]:
    return [f"layers.{layer}.{part}" for layer in layers for part in parts]


def _gathered_again(shape: ModelShape, run: MicrobatchShape) -> Iterator[Sent]:
    """What column GEMMs multiplied, for their weight gradients.

    In fp8, where norms are dropped, it is computed and cast anew; not in an MLP that runs again as a whole.
    """
    where, layers = "qkv and fc1, for the weight gradient", range(shape.num_layers)
    names = set(_names(COLUMNS, layers))
    in_fp8, values = names & run.fp8_sites, run.tokens * shape.hidden
    alone = COLUMNS[:1] if run.recompute.drops("mlp") else COLUMNS
    anew = in_fp8.intersection(_names(alone, layers)) if run.recompute.drops("layernorm") else set()
    if run.fp8_linked:
        yield Sent(f"{where}, in fp8", "all_gather", len(in_fp8), values)
        yield Sent(f"{where}, largest values", "all_reduce", len(anew) * run.fp8_measures, AMAX_BYTES)
        anew = set()
    yield Sent(where, "all_gather", len(names - in_fp8) + len(anew), values * run.item)


def _again(shape: ModelShape, run: MicrobatchShape, hidden: int, *, sequence: bool) -> Iterator[Sent]:
    """The forward collectives of what runs again: both halves of a layer in a unit, else its MLP alone."""
    units = run.recompute.units(shape.num_layers)
    covered = {layer for unit in units for layer in unit}
    alone = set(range(shape.num_layers)) - covered if run.recompute.drops("mlp") else set()
    halves = 2 * len(covered) + len(alone)
    if sequence:
        yield from _gathers("recompute", COLUMNS, covered, shape, run)
        yield from _gathers("recompute", COLUMNS[1:], alone, shape, run)
        yield Sent("recompute", "reduce_scatter", halves, hidden)
    else:
        yield Sent("recompute", "all_reduce", halves, hidden)
    if run.recompute.spread:
        yield Sent("recompute, its inputs", "all_gather", len(units), hidden)


def tp_of_step(partial_elements: int, grad_dtype: str, fp8_sites: int = 0) -> tuple[Sent, ...]:
    """The collectives of one optimizer step.

    Args:
        partial_elements: parameters whose gradient is a part of a sum on each rank: with sequence parallelism
            norms, biases of row GEMMs and learned positions; always q and k norms and shared groups.
        fp8_sites: GEMMs in fp8, of which all ranks of the run share three largest values.
    """
    partial_bytes = partial_elements * ITEM_BYTES[grad_dtype]
    return (
        Sent("gradient norm", "all_reduce", 1, NORM_BYTES),
        Sent("partial gradients", "all_reduce", int(partial_elements > 0), partial_bytes),
        Sent("largest values", "all_reduce", int(fp8_sites > 0), 3 * fp8_sites * AMAX_BYTES),
    )


def total_by_rank(sent: Iterable[Sent], tp: int) -> float:
    """Bytes each rank sends in all of them."""
    return sum(each.by_rank(tp) for each in sent)


def symmetric_workspace_bytes(shape: ModelShape, run: MicrobatchShape, tp: int) -> int:
    """The symmetric buffer that serves every GEMM of a run: two pieces, each of one rank's rows."""
    return 2 * (run.tokens // tp) * shape.hidden * run.item


def pushed_turn_bytes(shape: ModelShape, run: MicrobatchShape) -> int:
    """One turn of the area into which ranks push rows (comm/pushed.py): the tensor that travels, whole."""
    return run.tokens * shape.hidden * run.item


def peer_areas(turn_bytes: float, tp: int, joined: Joined) -> dict[str, int]:
    """Memory of a rank that its peers write, by who asks for it; no allocator of PyTorch counts it.

    Where the fastest is measured both are made, and what is not taken may go again.

    Args:
        turn_bytes: of the tensor that travels, whole.
    """
    sizes = {"pushed": TURNS * turn_bytes, "symmetric": 2 * turn_bytes / tp}
    asked = [name for name in sizes if joined in (name, "auto")] if tp > 1 else []
    return {f"{name}_area": round(sizes[name]) for name in asked}
