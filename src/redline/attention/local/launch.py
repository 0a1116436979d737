"""Launches of the attention kernels: grids, strides, descriptors. Imported at the first call, with Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redline.attention.local.backward import attention_dkv_kernel, attention_dq_kernel
from redline.attention.local.config import Tiles, launch_of, section
from redline.attention.local.forward import attention_forward_kernel
from redline.attention.local.op import Variant, padded_length
from redline.kernels.common import ceil_div, contiguous_like, next_power_of_2, on_device_of
from redline.rng import ATTENTION_LANES


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """q [Sq, B, N, D], k and v [Sk, B, G, D] -> out [Sq, B, N, D] contiguous, lse [B, N, Sq] fp32."""
    variant = Variant(*rest)
    q, k, v = map(_unit_channels, (q, k, v))
    S, B, N, D = q.shape
    out = contiguous_like(q)
    lse = torch.empty((B, N, S), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    tiles = launch_of(D, q.itemsize, q.get_device()).forward
    tiles = _fitting(tiles, k, v)
    repeat, q_tiles = N // k.shape[2], ceil_div(S, tiles.queries)
    side = section(B * N, repeat, 2 * k.shape[0] * D * k.itemsize)
    with on_device_of(q):
        attention_forward_kernel[(q_tiles * B * N,)](
            q, _source(k, tiles.keys, tiles), _source(v, tiles.keys, tiles), out, lse,
            *_places(variant), variant.sink, *_drawing(variant),
            S, k.shape[0], N, repeat, B, side, q_tiles, *_documents(variant),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *_numbers(variant),
            **_constants(variant, q, k.shape[0], tiles),
        )  # fmt: skip
    return out, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv) as q, k and v, contiguous, and statistics [2, B, N, Sq padded] fp32: delta first."""
    variant = Variant(*rest)
    do, q, k, v = map(_unit_channels, (do, q, k, v))
    out = out.contiguous()
    dq, dk, dv = map(contiguous_like, (q, k, v))
    S, B, N, D = q.shape
    padded = padded_length(S)
    statistics = torch.empty((2, B, N, padded), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), statistics.zero_()
    delta, base = statistics
    keys, G = k.shape[0], k.shape[2]
    repeat = N // G
    launch = launch_of(D, q.itemsize, q.get_device())
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    common = (*_places(variant), *_drawing(variant), S, padded, keys, N, repeat, B)
    tail = (*_documents(variant), *strides, *_numbers(variant))
    with on_device_of(q):
        tiles = _fitting(launch.dq, k, v)
        count = ceil_div(S, tiles.queries)
        side = section(B * N, repeat, 2 * keys * D * k.itemsize)
        attention_dq_kernel[(count * B * N,)](
            q, _source(k, tiles.keys, tiles), _source(v, tiles.keys, tiles), out, do, dq, delta, base,
            lse.contiguous(), *common, side, count,
            *tail,
            **_constants(variant, q, keys, tiles),
        )  # fmt: skip
        tiles = _fitting(launch.dkv, q, do)
        count = ceil_div(keys, tiles.keys)
        side = section(B * G, 1, 2 * S * repeat * D * q.itemsize)
        attention_dkv_kernel[(count * B * G,)](
            _source(q, tiles.queries, tiles), k, v, _source(do, tiles.queries, tiles), dk, dv,
            _vector(delta, tiles), _vector(base, tiles), *common, side, count, *tail,
            **_constants(variant, q, keys, tiles),
        )  # fmt: skip
    return dq, dk, dv, statistics


def _unit_channels(x: Tensor) -> Tensor:
    """x itself wherever its channels lie side by side, as the model's do."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _fitting(tiles: Tiles, *tensors: Tensor) -> Tiles:
    """The tiles without descriptors where one of the tensors lies as a descriptor cannot state."""
    if tiles.tma and not all(_describable(x) for x in tensors):
        return Tiles(tiles.queries, tiles.keys, tiles.warps, tiles.stages)
    return tiles


def _describable(x: Tensor) -> bool:
    """Whether every step from row to row, sample to sample and head to head is whole units of 16 bytes."""
    unit = 16 // x.itemsize
    steps = all(x.stride(dim) > 0 and x.stride(dim) % unit == 0 for dim in range(3) if x.shape[dim] > 1)
    return x.data_ptr() % 16 == 0 and steps and x.stride(3) == 1


def _source(x: Tensor, rows: int, tiles: Tiles) -> Any:
    """What a kernel reads x by: a descriptor of it, whose edges give zeros, or x itself."""
    if not tiles.tma:
        return x
    *_, D = x.shape
    strides = [x.stride(dim) if x.shape[dim] > 1 else next_power_of_2(D) for dim in range(3)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [rows, 1, 1, max(16, next_power_of_2(D))])


def _vector(x_BNS: Tensor, tiles: Tiles) -> Any:
    """The same for one number a query."""
    return TensorDescriptor(x_BNS, [x_BNS.numel()], [1], [tiles.queries]) if tiles.tma else x_BNS


def _documents(variant: Variant) -> tuple[int, int]:
    """The number of documents, empty ones counted, and the steps of a binary search among their ends."""
    if variant.cu_seqlens is None:
        return 0, 0
    entries = variant.cu_seqlens.numel()
    return entries - 1, entries.bit_length()


def _places(variant: Variant) -> tuple[Tensor | None, Tensor | None]:
    """Ends of documents and numbers of segments, row after row."""
    segments = variant.segment_ids
    return variant.cu_seqlens, None if segments is None else segments.contiguous()


def _drawing(variant: Variant) -> tuple[Tensor | None, ...]:
    return variant.key, variant.iteration, variant.sample_index, variant.positions


def _numbers(variant: Variant) -> tuple[float, ...]:
    threshold = ATTENTION_LANES.threshold(variant.probability)
    keep_scale = ATTENTION_LANES.scale(variant.probability)
    return (
        variant.scale, variant.softcap, variant.left, variant.right, threshold, keep_scale,
        variant.first_head,
    )  # fmt: skip


def _constants(variant: Variant, q: Tensor, keys: int, tiles: Tiles) -> dict[str, Any]:
    D = q.shape[3]
    return {
        "LEFT": variant.left >= 0,
        "RIGHT": variant.right >= 0,
        "CAPPED": variant.softcap > 0,
        "DROP": variant.probability > 0,
        "QUADS": keys % 4 == 0,
        "HEAD_DIM": D,
        "BLOCK_DIM": launch_of(D, q.itemsize, q.get_device()).block_dim,
        "QUERIES": tiles.queries,
        "KEYS": tiles.keys,
        "TMA": tiles.tma,
        "PRECISION": "ieee" if q.dtype == torch.float32 else None,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
