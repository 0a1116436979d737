"""What tensor parallelism sends: every collective of a microbatch and of a step, and the buffers it needs.

Without sequence parallelism the sum of a row GEMM is an all-reduce, and so is that of a column GEMM's input
gradient. With it each becomes a reduce-scatter of the same tensor beside an all-gather; a column GEMM's input
is gathered once more for its weight gradient, because only this rank's part of it is kept.

Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from redline.formulas.activations import Joined, MicrobatchShape
from redline.formulas.shape import ModelShape
from redline.formulas.state import ITEM_BYTES
from redline.formulas.traffic import Collective, sent_bytes

NORM_BYTES = 8  # the squared gradient norm, in float64
TURNS = 4  # in which an area is used that peers write (comm/pushed.py)


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
            Sent("qkv and fc1, forward", "all_gather", 2 * L, hidden),
            Sent("proj and fc2, forward", "reduce_scatter", 2 * L, hidden),
            Sent("proj and fc2, backward", "all_gather", 2 * L, hidden),
            Sent("qkv and fc1, for the weight gradient", "all_gather", 2 * L, hidden),
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


def _again(shape: ModelShape, run: MicrobatchShape, hidden: int, *, sequence: bool) -> Iterator[Sent]:
    """The forward collectives of what runs again: both halves of a layer in a unit, else its MLP alone."""
    units = run.recompute.units(shape.num_layers)
    covered = sum(map(len, units))
    halves = 2 * covered + (shape.num_layers - covered) * run.recompute.drops("mlp")
    if sequence:
        yield Sent("recompute", "all_gather", halves, hidden)
        yield Sent("recompute", "reduce_scatter", halves, hidden)
    else:
        yield Sent("recompute", "all_reduce", halves, hidden)
    if run.recompute.spread:
        yield Sent("recompute, its inputs", "all_gather", len(units), hidden)


def tp_of_step(partial_elements: int, grad_dtype: str) -> tuple[Sent, ...]:
    """The collectives of one optimizer step.

    Args:
        partial_elements: parameters whose gradient is a part of a sum on each rank: with sequence parallelism
            norms, biases of row GEMMs and learned positions; always q and k norms and shared groups.
    """
    norm = Sent("gradient norm", "all_reduce", 1, NORM_BYTES)
    if not partial_elements:
        return (norm,)
    grads = Sent("partial gradients", "all_reduce", 1, partial_elements * ITEM_BYTES[grad_dtype])
    return norm, grads


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
