"""Bytes: what collectives move between ranks, and what operators without a GEMM read and write.

Per token and layer, in a half-precision model (2 bytes an element), for the whole layer before any split.
"fused" counts what one kernel for each group of neighbouring operators touches; "plain" counts every operator
by itself, norms and softmax widened to fp32, as PyTorch runs them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from redline.formulas.shape import ModelShape
from redline.formulas.state import StateDtypes

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
HALF, SINGLE = 2, 4


def sent_bytes(kind: Collective, num_bytes: float, ranks: int) -> float:
    """Bytes one rank sends in a bandwidth-optimal collective over a tensor of `num_bytes` when whole."""
    if ranks == 1:
        return 0.0
    if kind == "send":
        return num_bytes
    share = (ranks - 1) / ranks * num_bytes
    return 2 * share if kind == "all_reduce" else share


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes a token of one layer's elementwise work.

    `outer` lies between the row-parallel and the next column-parallel GEMM (norms, dropout, residual), which
    only sequence parallelism splits over tp; `inner` (rotary, activation) is always split.
    """

    outer_forward: float
    outer_backward: float
    inner_forward: float
    inner_backward: float


def layer_bytes(shape: ModelShape, fused: bool) -> LayerBytes:
    """Elementwise traffic of one layer a token: two norms and residual additions, rotary, activation."""
    H, turned = shape.hidden, shape.q_size + shape.kv_size
    positions = shape.position == "rope"
    # Fused: a norm reads x and writes y; residual + bias + dropout reads two and writes one.
    norm, add = 2 * H * HALF, 3 * H * HALF
    mask = H * (shape.hidden_dropout > 0)  # a byte an element, written and read again
    outer_forward, outer_backward = 2 * (norm + add + mask), 2 * (3 * H * HALF + add + mask)
    activation = (shape.fc1_size + shape.ffn) * HALF
    activation_backward = (2 * shape.fc1_size + shape.ffn) * HALF
    rotary = 2 * turned * HALF * positions
    if not fused:
        # Norm: widen, square and mean, scale, narrow; bias, addition and dropout apart.
        passes = 4 if shape.normalization == "RMSNorm" else 5
        apart = 2 * H * HALF * (shape.bias_linear + (shape.hidden_dropout > 0))
        outer_forward = 2 * (passes * 2 * H * HALF + add + apart)
        outer_backward = 2 * ((passes + 2) * 2 * H * HALF + add + apart)
        activation += (
            2 * shape.ffn * HALF if shape.gated else 0
        ) + 2 * shape.fc1_size * HALF * shape.bias_linear
        activation_backward += 4 * shape.ffn * HALF if shape.gated else 0
        rotary *= 4
    qk_norm = 3 * turned * HALF * (shape.qk_norm != "none")
    return LayerBytes(
        outer_forward=outer_forward,
        outer_backward=outer_backward,
        inner_forward=activation + rotary + qk_norm,
        inner_backward=activation_backward + rotary + 1.5 * qk_norm,
    )


def score_bytes(fused_softmax: bool, dropout: bool) -> tuple[float, float]:
    """(forward, backward) bytes a score (of all S x S of a head) when attention writes them out.

    Fused: scale, mask and softmax in one kernel. Else each reads and writes, the softmax in fp32.
    """
    forward = 4 * HALF if fused_softmax else 6 * HALF + 3 * SINGLE
    backward = 6 * HALF if fused_softmax else 8 * HALF + 3 * SINGLE
    return (forward + 3 * HALF, backward + 3 * HALF) if dropout else (forward, backward)


def cast_bytes(shape: ModelShape, recipe: str) -> float:
    """Bytes a token and layer to quantize the operands of the four fp8 GEMMs, forward and backward.

    Each operand is read in 16 bits and written twice in 8 (as it is, and transposed). The norm and the
    activation write their fp8 output themselves under delayed scaling; every other recipe reads once more for
    the largest value, block scales write a little more.
    """
    apart = shape.q_size + (shape.q_size + 2 * shape.kv_size) + shape.fc1_size + 2 * shape.hidden
    fusable = 2 * shape.hidden + shape.ffn
    if recipe == "delayed":
        return (HALF + 2) * apart + 2 * fusable
    return (2 * HALF + 2) * (apart + fusable)


def gathered_bytes_each(shape: ModelShape, in_fp8: bool, item: float = HALF) -> float:
    """Bytes that an all-gather of the parameters moves for each: the GEMMs' weights may travel in fp8."""
    layer = shape.hidden * (2 * shape.q_size + 2 * shape.kv_size + shape.fc1_size + shape.ffn)
    tables = shape.padded_vocab_size * shape.hidden * (1 if shape.tied else 2)
    share = shape.num_layers * layer / (shape.num_layers * layer + tables)
    return item - share * (item - 1) if in_fp8 else item


def loss_bytes(fused: bool) -> float:
    """Bytes a logit, forward and backward: one fused pass each way, or fp32 copies operator by operator."""
    return 4 * HALF if fused else 2 * HALF + 11 * SINGLE


def optimizer_bytes(grad_bytes: int, main_bytes: int = SINGLE) -> float:
    """Bytes a parameter of one AdamW step: norm and clipping of gradients, moments, main and model copy."""
    gradient = grad_bytes * 5  # zeroed, read for the norm, scaled (read and write), read by Adam
    return gradient + 6 * main_bytes + main_bytes + HALF


def update_bytes(elements: int, dtypes: StateDtypes) -> float:
    """Bytes of one AdamW step in one pass over `elements`: states both ways, parameters as they need be.

    Beside main parameters of their own, parameters are written only; the 16 bits of a remainder belong to
    both.
    """
    each = dtypes.bytes_each()
    states = each["main_params"] + each["exp_avg"] + each["exp_avg_sq"]
    apart = each["main_params"] > 0 and not dtypes.remainder
    return elements * (each["main_grads"] + 2 * states + each["weights"] * (1 if apart else 2))


def unscale_bytes(grad_bytes: int) -> float:
    """Bytes a parameter of the pass that divides fp16 gradients by the loss scale and looks for overflow."""
    return 2.0 * grad_bytes


def skipped_share(window: int, hysteresis: int) -> float:
    """Share of steps that a dynamic loss scale may throw away once it has settled.

    After `window` good steps the scale doubles; where the doubled one overflows, `hysteresis` steps are
    skipped until it halves again. At most so many: a scale whose double fits skips none.
    """
    return hysteresis / (window + hysteresis)


def data_parallel_collectives(
    buckets: Sequence[int],
    ranks: int,
    *,
    sharded: bool,
    instances: int,
    grad_bytes: int,
    param_bytes: int | Sequence[int],
) -> list[tuple[Collective, int]]:
    """(kind, bytes of the whole tensor) of all that one step sends along dp, whatever overlaps.

    Args:
        buckets: elements of each, padding included.
        ranks: that share each bucket; one of them alone sends nothing to the others.
        sharded: by a distributed optimizer, in so many `instances`.
        param_bytes: of a parameter, in all buckets or in each: 1 where it is stored in fp8.
    """
    sent: list[tuple[Collective, int]] = []
    items = [param_bytes] * len(buckets) if isinstance(param_bytes, int) else param_bytes
    for size, item in zip(buckets, items, strict=True):
        if ranks > 1:
            sent.append(("reduce_scatter" if sharded else "all_reduce", size * grad_bytes))
        if instances > 1:
            sent.append(("all_reduce", size // (ranks if sharded else 1) * grad_bytes))
        if ranks > 1 and sharded:
            sent.append(("all_gather", size * item))
    return [*sent, ("all_reduce", 2 * 8)] if ranks > 1 else sent  # norm and zeros, in float64
