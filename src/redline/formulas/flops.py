"""Model FLOPs: what the mathematics of one training step needs, never what an implementation spends.

Forward and backward together are three times forward (one product forward, two backward), a multiply-add is
two FLOPs, hence the 6 in front of every weight. Counted: all GEMMs with weights, the router, attention's two
products, the vocabulary projection at its true size (padding is no useful work). Not counted: look-ups (the
embedding is one), norms, softmax, activation functions, rotary, dropout, optimizer, and anything that is
recomputed.

Two conventions for attention under a causal mask, both in use among published numbers:
    "causal-half"   half of the S x S products, which is what the mask leaves (S x S/2, the diagonal at half)
    "full"          all S x S products, as if there were no mask
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from redline.formulas.params import is_moe
from redline.formulas.shape import ModelShape

Convention = Literal["causal-half", "full"]
CONVENTIONS: tuple[Convention, ...] = ("causal-half", "full")

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2
PER_WEIGHT = FORWARD_AND_BACKWARD * MULTIPLY_ADD


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Model FLOPs of one token, forward and backward, by component; `mtp` is all depths with their heads."""

    convention: Convention
    attention_proj: int
    attention_core: int
    mlp: int
    router: int
    head: int
    mtp: int

    @property
    def total(self) -> int:
        """All components."""
        return self.attention_proj + self.attention_core + self.mlp + self.router + self.head + self.mtp

    @property
    def forward(self) -> int:
        """The forward pass alone."""
        return self.total // FORWARD_AND_BACKWARD

    def as_dict(self) -> dict[str, int | str]:
        """Plain values with the total, for JSON."""
        return asdict(self) | {"total": self.total}


def flops_per_token(shape: ModelShape, seq_length: int, convention: Convention = "causal-half") -> TokenFlops:
    """Model FLOPs of one token of a sequence of `seq_length` tokens under a causal mask."""
    return _per_token(shape, _attention_core(shape, seq_length, convention), convention)


class Attended(NamedTuple):
    """The scores of sequences of several lengths: those within reach, and twice those a causal mask hides."""

    scores: int
    hidden_twice: int


def attended(shape: ModelShape, lengths: Iterable[int]) -> Attended:
    """What attention computes for sequences, or packed documents, of these lengths."""
    scores = hidden_twice = 0
    for length in lengths:
        seen = length
        if shape.window is not None and shape.window[0] >= 0:
            seen = min(length, shape.window[0] + 1)
        scores += length * seen
        hidden_twice += seen * seen
    return Attended(scores, hidden_twice)


def flops_per_packed_token(
    shape: ModelShape, num_tokens: int, work: Attended, convention: Convention = "causal-half"
) -> TokenFlops:
    """Model FLOPs of the mean token of sequences of several lengths.

    Args:
        num_tokens: of all of them; padding is no work.
    """
    twice = 2 * work.scores - (0 if convention == "full" else work.hidden_twice)
    core = FORWARD_AND_BACKWARD * 2 * MULTIPLY_ADD * shape.q_size * twice // (2 * num_tokens)
    return _per_token(shape, core, convention)


def _per_token(shape: ModelShape, core: int, convention: Convention) -> TokenFlops:
    """All components, given that of attention's products in one layer."""
    moe_layers = sum(is_moe(shape, layer) for layer in range(shape.num_layers))
    dense_layers = shape.num_layers - moe_layers
    proj = _attention_proj(shape)
    head = PER_WEIGHT * shape.hidden * shape.vocab_size
    last_is_moe = is_moe(shape, shape.num_layers - 1)
    depth = proj + core + (_moe(shape) + _router(shape) if last_is_moe else _dense(shape))
    depth += PER_WEIGHT * 2 * shape.hidden * shape.hidden + head
    return TokenFlops(
        convention=convention,
        attention_proj=shape.num_layers * proj,
        attention_core=shape.num_layers * core,
        mlp=dense_layers * _dense(shape) + moe_layers * _moe(shape),
        router=moe_layers * _router(shape),
        head=head,
        mtp=shape.mtp_num_layers * depth,
    )


def flops_per_step(
    shape: ModelShape, seq_length: int, global_batch_size: int, convention: Convention = "causal-half"
) -> int:
    """Model FLOPs of one optimizer step over `global_batch_size` sequences."""
    return flops_per_token(shape, seq_length, convention).total * seq_length * global_batch_size


def _attention_proj(shape: ModelShape) -> int:
    return PER_WEIGHT * shape.hidden * (2 * shape.q_size + 2 * shape.kv_size)


def _attention_core(shape: ModelShape, seq_length: int, convention: Convention) -> int:
    """Q K^T and P V: each S x D products for every head and token; kv groups share, so they do not appear."""
    twice = attention_keys_twice(shape, seq_length, convention)
    return FORWARD_AND_BACKWARD * 2 * MULTIPLY_ADD * shape.q_size * twice // 2


def attention_pass_flops(
    lengths: Sequence[int], num_heads: int, head_dim: int, *, causal: bool = True
) -> tuple[int, int]:
    """FLOPs of one layer's attention over documents of these lengths: forward, backward.

    Two products forward and five backward, which need the scores again: so the rates of attention kernels are
    published. A causal mask counts half.
    """
    seen = sum(length * length for length in lengths)
    product = MULTIPLY_ADD * num_heads * head_dim * (seen // 2 if causal else seen)
    return 2 * product, 5 * product


def attention_keys_twice(shape: ModelShape, seq_length: int, convention: Convention = "causal-half") -> int:
    """Twice the keys that a token sees in the mean, so that it is whole.

    A window of W keys, its own counted: W, less what the first W tokens lack, W / 2S of it. "full" counts
    every score that a kernel without a causal mask computes: S, or W inside a window.
    """
    seen = seq_length
    if shape.window is not None and shape.window[0] >= 0:
        seen = min(seq_length, shape.window[0] + 1)
    return 2 * seen if convention == "full" else 2 * seen - seen * seen // seq_length


def _dense(shape: ModelShape) -> int:
    return _mlp(shape, shape.ffn)


def _moe(shape: ModelShape) -> int:
    return _mlp(shape, shape.moe_ffn * shape.moe_topk + shape.moe_shared_ffn)


def _mlp(shape: ModelShape, ffn: int) -> int:
    return PER_WEIGHT * shape.hidden * ffn * (3 if shape.gated else 2)


def _router(shape: ModelShape) -> int:
    return PER_WEIGHT * shape.hidden * shape.num_experts
