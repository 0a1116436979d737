"""FLOPs and bytes of an operator from what a profiler recorded of it: its name, and its inputs' shapes.

A multiply-add is two FLOPs. Attention counts its two products forward and four backward, half of each under a
causal mask; scores that a backward makes anew are recomputed work and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

Dims = Sequence[Any]  # of each input: its sizes, [] for a scalar or for no tensor, lists in a list of tensors

_ITEM_BYTES = {
    "double": 8, "long int": 8, "long": 8, "c10::complex<float>": 8, "float": 4, "int": 4,
    "c10::bfloat16": 2, "c10::half": 2, "short": 2, "unsigned short": 2, "bool": 1, "unsigned char": 1,
    "signed char": 1, "char": 1,
}  # fmt: skip

_VIEWS = frozenset((
    "view", "reshape", "permute", "transpose", "t", "numpy_T", "as_strided", "expand", "expand_as",
    "select", "slice", "narrow", "split", "unbind", "chunk", "squeeze", "unsqueeze", "flatten", "unflatten",
    "detach", "detach_", "alias", "empty", "empty_like", "empty_strided", "resolve_conj", "_unsafe_view",
    "view_as", "movedim", "swapaxes", "result_type", "is_nonzero", "item", "_local_scalar_dense",
    "lift_fresh", "resize_", "set_", "_reshape_alias", "is_pinned",
))  # fmt: skip

_FILLS = frozenset(("aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_"))
_GATED = ("gatedactivation", "swiglu", "geglu", "aten::glu")
# Functions that keep their input: what backward moves, in sizes of the one gradient that is recorded.
_BACKWARDS = {"BiasActivationFnBackward": 3, "RMSNormFnBackward": 3, "LayerNormFnBackward": 3}

# Where the two factors stand among the inputs.
_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::_scaled_mm": (0, 1), "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2), "aten::baddbmm": (1, 2), "aten::baddbmm_": (1, 2), "aten::addbmm": (1, 2),
    "aten::_addmm_activation": (1, 2), "aten::_scaled_mm_v2": (0, 1),
}  # fmt: skip
_TRANSPOSED = {"aten::linear": (0, 1), "aten::mkldnn_linear": (0, 1), "mkldnn::_linear_pointwise": (0, 1)}
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attn", "attentionfn",
              "scaled_dot_product", "fused_attn", "attnfunc")  # fmt: skip


def gemm_sizes(name: str, dims: Dims) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of a matrix product, None for anything else."""
    places = _PRODUCTS.get(name) or _TRANSPOSED.get(name)
    if places is None or len(dims) <= places[1]:
        return None
    left, right = dims[places[0]], dims[places[1]]
    if len(left) < 2 or len(right) < 2 or not all(isinstance(size, int) for size in (*left, *right)):
        return None
    if name in _TRANSPOSED:
        return 1, prod(left[:-1]), right[0], left[-1]
    return prod(left[:-2]), left[-2], right[-1], left[-1]


def moves_nothing(name: str) -> bool:
    """Whether an operator only makes a view or takes memory, so that its time is its call."""
    return name.removeprefix("aten::") in _VIEWS


def operator_flops(name: str, dims: Dims, *, causal: bool = True) -> float | None:
    """FLOPs of one call of a GEMM or of attention; None for other operators and unknown shapes.

    Args:
        causal: whether attention's mask is (a trace does not say; a language model's is).
    """
    sizes = gemm_sizes(name, dims)
    if sizes is not None:
        return float(2 * prod(sizes))
    lower = name.lower()
    if any(part in lower for part in _ATTENTION):
        return _attention_flops(dims, backward="backward" in lower, causal=causal)
    return None


def _attention_flops(dims: Dims, *, backward: bool, causal: bool) -> float | None:
    """q, k and v are the first three inputs of four dimensions, after the output's gradient in backward.

    [B, heads, S, D] or [B, S, heads, D]: the sequence is the dimension of the two that k shares with q
    when the heads differ, and the larger one when nothing tells them apart.
    """
    four: list[list[int]] = [
        each for each in dims if len(each) == 4 and all(isinstance(size, int) for size in each)
    ]
    if len(four) < 3 + backward:
        return None
    q, k = four[backward], four[backward + 1]
    B, D = q[0], q[3]
    if q[1] == k[1] and q[2] == k[2]:
        heads, length, keys = min(q[1], q[2]), max(q[1], q[2]), max(k[1], k[2])
    else:
        at = 1 if q[1] == k[1] else 2
        heads, length, keys = q[3 - at], q[at], k[at]
    products = 2 * 2 * B * heads * length * keys * D * (2 if backward else 1)
    return products / (2 if causal and length == keys else 1)


def operator_bytes(name: str, dims: Dims, types: Sequence[str]) -> float | None:
    """Bytes one call moves at least: each input once, and an output; None where no input is a known tensor.

    A product's output has its own size, that of a gated activation half its input's. Any other is taken to
    be as large as the largest input, and an operator in place (`add_`) writes one of its inputs; one that
    fills a tensor reads nothing. An embedding reads the rows that it looks up, not its table.
    """
    if moves_nothing(name):
        return None
    inputs: list[tuple[int, int]] = [
        (prod(shape), _ITEM_BYTES[kind.lower()])
        for shape, kind in zip(dims, types, strict=False)
        if kind.lower() in _ITEM_BYTES and all(isinstance(size, int) for size in shape)
    ]
    if not inputs:
        return None
    read = sum(count * item for count, item in inputs)
    sizes = gemm_sizes(name, dims)
    if sizes is not None:
        batch, m, n, _ = sizes
        return read + batch * m * n * inputs[-1][1]
    if name.endswith("copy_") or name in _FILLS:
        return read  # the target is one of the inputs, and the only one where it is filled
    largest = max(count * item for count, item in inputs)
    lower = name.lower()
    if any(word in lower for word in _GATED):
        # Backward reads gate and up, which it saved, and writes their gradients: twice the output's each.
        return float(read + 4 * largest if "backward" in lower else read + largest / 2)
    if name in _BACKWARDS:
        return float(read * _BACKWARDS[name])
    if "embedding" in lower and "backward" not in lower:
        return _embedding_bytes(dims, types)
    return float(read + largest)


def _embedding_bytes(dims: Dims, types: Sequence[str]) -> float | None:
    """Of a look-up: each index, and each row read and written; of several tables all rows.

    A second table of the same shape is the buffer of the first one's gradient.
    """
    indices, rows, tables = 0, 0, []
    for shape, kind in zip(dims, types, strict=False):
        if kind.lower() in ("long int", "long", "int"):
            indices = max(indices, prod(shape))
        elif kind.lower() in _ITEM_BYTES and len(shape) == 2 and shape not in tables:
            rows += shape[1] * _ITEM_BYTES[kind.lower()]
            tables.append(shape)
    return float(indices * (8 + 2 * rows)) if indices and rows else None
