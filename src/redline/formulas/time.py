"""Durations from rates: GEMMs, attention, streams of bytes, collectives, the pipeline's bubble.

Each is a roofline with one shape-dependent loss: what does not fill the machine runs below its best rate.
The rates are plan/'s calibration; nothing here knows a device by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from redline.formulas.traffic import Collective, sent_bytes

TILE_M, TILE_N = 128, 256  # of the large GEMM kernels of Ampere and newer
WAVES_LOST = 0.30  # waves of tiles that filling and draining the machine costs
DEPTH_LOST = 160  # products along k that a tile's prologue and epilogue cost
HEAD_LOST = 24  # head channels at which attention runs at half its rate, from 64 against 128
LENGTH_LOST = 350  # tokens of a sequence at which it runs at half its rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path between ranks: bytes a second each rank can send in one direction, and the cost of a start."""

    bytes_per_s: float
    latency_s: float
    hop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one device reaches.

    Attributes:
        peak: dense FLOP/s by dtype of the operands.
        gemm: share of it a large GEMM sustains, by dtype.
        attention: (forward, backward) share of the 16-bit peak by backend, head 128, long sequences.
        bytes_per_s: streams of bytes, sustained.
        units: multiprocessors, over which tiles are spread.
        kernel_s: start of one kernel on the device.
        node, network: links inside a node, and of one device to other nodes.
        collectives: links inside a node as single collectives were measured to see them; others see `node`.
        gpus_per_node: devices that share `node`.
        host_bytes_per_s: copies from and to pinned host memory, one direction.
    """

    peak: Mapping[str, float]
    gemm: Mapping[str, float]
    attention: Mapping[str, tuple[float, float]]
    bytes_per_s: float
    units: int
    kernel_s: float
    node: Link
    network: Link
    gpus_per_node: int
    host_bytes_per_s: float
    collectives: Mapping[str, Link] = field(default_factory=dict)


def gemm_s(rates: Rates, m: float, n: float, k: float, dtype: str, slower: float = 1.0) -> float:
    """Seconds of an [m, k] x [k, n] product.

    Args:
        dtype: of the operands.
        slower: factor on its time, for an epilogue that reads and writes fp32.
    """
    if min(m, n, k) <= 0:
        return 0.0
    flops = 2 * m * n * k
    tiles = math.ceil(m / TILE_M) * math.ceil(n / TILE_N)
    waves = tiles / rates.units
    # Split-k keeps a grid of few tiles from idling the machine, at the price of adding the parts.
    filled = max(waves / (waves + WAVES_LOST), min(1.0, k / 16384) * 0.7)
    deep = k / (k + DEPTH_LOST)
    rate = rates.peak[dtype] * rates.gemm[dtype] * filled * deep
    item = 1 if dtype == "fp8" else 4 if dtype == "fp32" else 2
    moved = item * (m * k + k * n) + 2 * m * n
    return max(flops / rate * slower, moved / rates.bytes_per_s) + rates.kernel_s


def attention_s(
    rates: Rates, flops: float, backend: str, head_dim: int, length: float, *, backward: bool
) -> float:
    """Seconds of attention's products without scores in memory; `flops` at half for a causal mask."""
    share = rates.attention[backend][backward]
    wide = head_dim / (head_dim + HEAD_LOST) * (128 + HEAD_LOST) / 128
    reached = share * min(wide, 1.05) * length / (length + LENGTH_LOST)
    return flops / (rates.peak["bf16"] * reached) + rates.kernel_s


def stream_s(rates: Rates, num_bytes: float) -> float:
    """Seconds to read and write so many bytes."""
    return num_bytes / rates.bytes_per_s


def collective_s(
    rates: Rates, kind: Collective, num_bytes: float, ranks: int, stride: int = 1, times: int = 1
) -> float:
    """Seconds of `times` collectives over tensors of `num_bytes` (each, when whole).

    Args:
        stride: distance of neighbours among the ranks. A group inside a node runs over its links; one across
            nodes over the network, which each of its members in a node adds a card to.
    """
    if ranks <= 1 or num_bytes <= 0:
        return 0.0
    per_node = max(1, rates.gpus_per_node // stride)
    inside = stride * ranks <= rates.gpus_per_node
    nodes = 1 if inside else math.ceil(ranks / per_node)
    if inside:
        link = rates.collectives.get(kind, rates.node)
        rate, latency = link.bytes_per_s, link.latency_s + link.hop_s * (ranks - 1)
    else:
        rate = min(rates.node.bytes_per_s, rates.network.bytes_per_s * min(per_node, ranks))
        if kind in ("all_to_all", "send"):
            rate = rates.network.bytes_per_s
        latency = rates.network.latency_s + rates.network.hop_s * math.log2(nodes)
    return times * (latency + sent_bytes(kind, num_bytes, ranks) / rate)


def unhidden_s(copy_s: float, forward_s: float) -> float:
    """Seconds that layers wait at least for their offloaded activations.

    Args:
        copy_s: of one way; out beside their forward, back beside their backward.
        forward_s: of their forward pass. Backward takes twice as long.
    """
    return max(0.0, copy_s - forward_s) + max(0.0, copy_s - 2 * forward_s)


def round_trip_s(num_bytes: float, bytes_per_s: float, *, overlap: bool) -> float:
    """Seconds in which `num_bytes` come from host memory and go back there, at once or in turn."""
    return (1 if overlap else 2) * num_bytes / bytes_per_s


def bubble_share(pp: int, vpp: int, num_microbatches: int) -> float:
    """Idle time of a pipeline over its busy time: (pp - 1) / (vpp x microbatches), one-forward-one-backward.

    Narayanan et al. 2021, arXiv 2104.04473, sections 2.2.1 and 2.2.2.
    """
    return (pp - 1) / (vpp * num_microbatches)
