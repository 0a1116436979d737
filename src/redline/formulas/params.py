"""Parameters of a model, tensor by logical tensor: the one list that counts, checkpoints' names and shards
agree on.

Logical tensors are the plain ones: q, k, v, gate and up apart, the vocabulary at its true size. How they lie
in memory (merged, padded, sharded) is said here too, as numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from redline.formulas.shape import ModelShape, TpRank
from redline.units import round_up

# How tensor and expert parallelism cut a tensor: column and vocab along dim 0, row along dim 1, expert along
# the experts; a replicated one is whole on every rank.
Split = Literal["column", "row", "vocab", "expert", "replicated"]
Part = Literal["embedding", "attention", "mlp", "norm", "router", "experts", "mtp", "head"]

MERGED = (  # logical names whose tensors are one parameter
    (re.compile(r"\.attention\.[qkv]\.(weight|bias)$"), r".attention.qkv.\1"),
    (re.compile(r"\.mlp(\.shared)?\.(?:gate|up)\.(weight|bias)$"), r".mlp\1.fc1.\2"),
)
_KEYS_VALUES = re.compile(r"\.attention\.[kv]\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One weight or bias of the model, in the plain layout.

    `layer` is the decoder layer it belongs to; None for what stands before or behind the layers.
    """

    name: str
    size: tuple[int, ...]
    split: Split
    part: Part
    layer: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a logical tensor that a rank holds: where it begins in the whole, and its size."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements; 0 where the rank holds only padding of the vocabulary."""
        return math.prod(self.size)


def rank_slice(tensor: LogicalTensor, shape: ModelShape, rank: TpRank) -> Slice:
    """What one tensor-parallel rank holds of `tensor`: equal parts of its rows or columns, or all of it.

    With fewer groups than ranks each rank holds one whole group of keys and values, shared with its
    neighbours. The padding of the vocabulary lies behind its true rows: the last ranks hold fewer of these.
    """
    size, offset = list(tensor.size), [0] * len(tensor.size)
    if tensor.split == "column":
        size[0] //= rank.size
        offset[0] = rank.index * size[0]
        if shares_group(tensor, shape, rank.size):
            size[0] = shape.head_dim
            offset[0] = rank.index * shape.num_groups // rank.size * shape.head_dim
    elif tensor.split == "row":
        size[1] //= rank.size
        offset[1] = rank.index * size[1]
    elif tensor.split == "vocab":
        rows = shape.padded_vocab_size // rank.size
        offset[0] = min(rank.index * rows, shape.vocab_size)
        size[0] = min(rows, shape.vocab_size - offset[0])
    return Slice(tuple(offset), tuple(size))


@dataclass(frozen=True, slots=True)
class Shared:
    """What one rank knows of a parameter that other tensor-parallel ranks hold too, in elements of it.

    Attributes:
        copies: ranges that a rank before this one holds as well: not counted here.
        partial: (start, end, place): a range whose gradient is a part of the sum over ranks, and where it
            belongs in the vector in which the ranks add up the parameter.
        size: elements of that vector.
    """

    copies: tuple[tuple[int, int], ...] = ()
    partial: tuple[tuple[int, int, int], ...] = ()
    size: int = 0


def shares_group(tensor: LogicalTensor, shape: ModelShape, tp: int) -> bool:
    """Whether several of `tp` ranks hold this tensor's rows because there are fewer groups than ranks."""
    return tp > shape.num_groups and _KEYS_VALUES.search(tensor.name) is not None


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """How many parameters a model has, and where.

    Attributes:
        total: all of them, each tied matrix once, the vocabulary at its true size.
        active: those one token meets: of the experts only `topk`.
        by_part: (part, count) in the order of the model.
    """

    total: int
    active: int
    by_part: tuple[tuple[Part, int], ...]

    def of(self, part: Part) -> int:
        """Parameters of one part; 0 when the model has none."""
        return dict(self.by_part).get(part, 0)

    @property
    def non_embedding(self) -> int:
        """All but the word and position tables; a head of its own counts."""
        return self.total - self.of("embedding")

    def as_dict(self) -> dict[str, int]:
        """Plain values, for JSON."""
        totals = {"total": self.total, "active": self.active, "non_embedding": self.non_embedding}
        return totals | {str(part): count for part, count in self.by_part}


@lru_cache(maxsize=64)
def logical_tensors(shape: ModelShape) -> tuple[LogicalTensor, ...]:
    """Every parameter of the model, in the order of the forward pass."""
    tensors = [LogicalTensor("embedding.word.weight", (shape.vocab_size, shape.hidden), "vocab", "embedding")]
    if shape.position == "learned_absolute":
        size = (shape.max_positions, shape.hidden)
        tensors.append(LogicalTensor("embedding.position.weight", size, "replicated", "embedding"))
    for layer in range(shape.num_layers):
        tensors += _layer(shape, f"layers.{layer}", layer, is_moe(shape, layer))
    tensors += _norm(shape, "final_norm", shape.hidden)
    for depth in range(shape.mtp_num_layers):
        tensors += _mtp(shape, f"mtp.{depth}")
    if not shape.tied:
        tensors.append(LogicalTensor("head.weight", (shape.vocab_size, shape.hidden), "vocab", "head"))
    return tuple(tensors)


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the model, in all and by part."""
    by_part: dict[Part, int] = {}
    idle = 0
    for tensor in logical_tensors(shape):
        by_part[tensor.part] = by_part.get(tensor.part, 0) + tensor.numel
        if tensor.split == "expert":
            idle += tensor.numel * (shape.num_experts - shape.moe_topk) // shape.num_experts
    total = sum(by_part.values())
    return ParameterCount(total=total, active=total - idle, by_part=tuple(by_part.items()))


def layer_parameters(shape: ModelShape, layer: int) -> int:
    """Parameters of one decoder layer, its norms included."""
    return sum(tensor.numel for tensor in logical_tensors(shape) if tensor.layer == layer)


def physical_sizes(shape: ModelShape, tp: int = 1) -> dict[str, int]:
    """Elements of each parameter as it is stored: q, k, v merged, gate and up merged, vocabulary padded.

    Of a parameter that `tp` ranks share, those of one rank.
    """
    sizes: dict[str, int] = {}
    for tensor in logical_tensors(shape):
        name = tensor.name
        for pattern, merged in MERGED:
            name = pattern.sub(merged, name)
        size = rank_slice(tensor, shape, TpRank(tp)).size
        rows = shape.padded_vocab_size // tp if tensor.split == "vocab" else size[0]
        sizes[name] = sizes.get(name, 0) + rows * math.prod(size[1:])
    return sizes


def stored_elements(shape: ModelShape, alignment: int = 1, tp: int = 1) -> int:
    """Elements of all parameters stored on one of `tp` ranks, each rounded up to `alignment`."""
    return sum(round_up(size, alignment) for size in physical_sizes(shape, tp).values())


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters one rank of a pipeline stage holds: sharded by tp, by experts, and whole."""

    sharded: int
    experts: int
    replicated: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.sharded + self.experts + self.replicated


def rank_parameters(
    shape: ModelShape, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None
) -> tuple[RankParameters, ...]:
    """What a rank of each of the `pp` stages holds (layers spread evenly, the first stages one more).

    Experts are cut by etp x ep ranks and never by tp (etp None means tp); norms, router, biases of row-split
    matrices and positions are whole everywhere. With tied embeddings and pp > 1 the last stage holds a copy
    for its head.
    """
    expert_ranks = ep * (tp if etp is None else etp)
    stages = []
    for stage, layers in enumerate(stage_layers(shape.num_layers, pp)):
        first, last = stage == 0, stage == pp - 1
        held = [tensor for tensor in logical_tensors(shape) if _on_stage(tensor, layers, first, last)]
        if shape.tied and last and not first:
            held.append(logical_tensors(shape)[0])
        cut = sum(_padded(shape, tensor) for tensor in held if tensor.split in ("column", "row", "vocab"))
        experts = sum(tensor.numel for tensor in held if tensor.split == "expert")
        whole = sum(tensor.numel for tensor in held if tensor.split == "replicated")
        stages.append(RankParameters(-(-cut // tp), -(-experts // expert_ranks), whole))
    return tuple(stages)


def stage_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """Which decoder layers each of `pp` stages runs: consecutive and as even as can be."""
    short, extra = divmod(num_layers, pp)
    starts = [stage * short + min(stage, extra) for stage in range(pp + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def is_moe(shape: ModelShape, layer: int) -> bool:
    """Whether this decoder layer has experts in place of one MLP."""
    return bool(shape.num_experts) and (not shape.moe_layer_pattern or shape.moe_layer_pattern[layer])


def _padded(shape: ModelShape, tensor: LogicalTensor) -> int:
    return (
        tensor.numel // shape.vocab_size * shape.padded_vocab_size
        if tensor.split == "vocab"
        else tensor.numel
    )


def _on_stage(tensor: LogicalTensor, layers: range, first: bool, last: bool) -> bool:
    if tensor.layer is not None:
        return tensor.layer in layers
    return first if tensor.part == "embedding" else last


def _layer(shape: ModelShape, name: str, layer: int | None, moe: bool) -> Iterator[LogicalTensor]:
    hidden, head = shape.hidden, shape.head_dim
    yield from _norm(shape, f"{name}.attention.norm", hidden, layer)
    for which, rows in (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size)):
        linear = f"{name}.attention.{which}"
        yield from _linear(linear, (rows, hidden), "column", "attention", layer, shape.bias_qkv)
    if shape.qk_norm == "norm":
        yield from _norm(shape, f"{name}.attention.q_norm", head, layer)
        yield from _norm(shape, f"{name}.attention.k_norm", head, layer)
    if shape.softmax_type == "learnable":
        yield LogicalTensor(f"{name}.attention.sink", (shape.num_heads,), "column", "attention", layer)
    proj = f"{name}.attention.proj"
    yield from _linear(proj, (hidden, shape.q_size), "row", "attention", layer, shape.bias_linear)
    yield from _norm(shape, f"{name}.mlp.norm", hidden, layer)
    if not moe:
        yield from _mlp(shape, f"{name}.mlp", shape.ffn, layer)
        return
    experts = shape.num_experts
    yield LogicalTensor(f"{name}.mlp.router.weight", (experts, hidden), "replicated", "router", layer)
    for which in _up_names(shape):
        yield from _experts(shape, f"{name}.mlp.experts.{which}", (shape.moe_ffn, hidden), layer)
    yield from _experts(shape, f"{name}.mlp.experts.down", (hidden, shape.moe_ffn), layer)
    if shape.moe_shared_ffn:
        yield from _mlp(shape, f"{name}.mlp.shared", shape.moe_shared_ffn, layer)


def _mlp(shape: ModelShape, name: str, ffn: int, layer: int | None) -> Iterator[LogicalTensor]:
    for which in _up_names(shape):
        yield from _linear(f"{name}.{which}", (ffn, shape.hidden), "column", "mlp", layer, shape.bias_linear)
    yield from _linear(f"{name}.down", (shape.hidden, ffn), "row", "mlp", layer, shape.bias_linear)


def _experts(
    shape: ModelShape, name: str, size: tuple[int, int], layer: int | None
) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", (shape.num_experts, *size), "expert", "experts", layer)
    if shape.bias_linear:
        yield LogicalTensor(f"{name}.bias", (shape.num_experts, size[0]), "expert", "experts", layer)


def _mtp(shape: ModelShape, name: str) -> Iterator[LogicalTensor]:
    """A depth of multi-token prediction: two norms, the 2h -> h matrix, a layer like the last, a norm."""
    moe = is_moe(shape, shape.num_layers - 1)
    yield from _norm(shape, f"{name}.embedding_norm", shape.hidden, None, "mtp")
    yield from _norm(shape, f"{name}.hidden_norm", shape.hidden, None, "mtp")
    yield LogicalTensor(f"{name}.proj.weight", (shape.hidden, 2 * shape.hidden), "column", "mtp")
    for tensor in _layer(shape, f"{name}.layer", None, moe):
        yield LogicalTensor(tensor.name, tensor.size, tensor.split, "mtp")
    yield from _norm(shape, f"{name}.final_norm", shape.hidden, None, "mtp")


def _norm(
    shape: ModelShape, name: str, size: int, layer: int | None = None, part: Part = "norm"
) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", (size,), "replicated", part, layer)
    if shape.normalization == "LayerNorm":
        yield LogicalTensor(f"{name}.bias", (size,), "replicated", part, layer)


def _linear(
    name: str, size: tuple[int, int], split: Split, part: Part, layer: int | None, bias: bool
) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", size, split, part, layer)
    if bias:  # a row-split matrix adds its bias after the sum over ranks, so each rank holds it whole
        yield LogicalTensor(f"{name}.bias", size[:1], "replicated" if split == "row" else split, part, layer)


def _up_names(shape: ModelShape) -> tuple[str, ...]:
    return ("gate", "up") if shape.gated else ("up",)
