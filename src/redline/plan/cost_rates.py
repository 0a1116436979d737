"""Calibration: the share of its data sheet that a device of each generation sustains in training.

Hopper's shares are measured (one H200: GEMMs at Llama-8B shapes, attention alone, copies, collectives over
NVLink, whole steps of megatron-core and of the plain path). Those of Ampere and Blackwell are set so that
published runs come out right. docs/doctor.md states how well they all do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redline.errors import ConfigError
from redline.formulas.time import Link, Rates
from redline.hardware import Hardware, MeasuredLinks, links_of

MICROSECOND = 1e-6
GIGABIT = 1e9 / 8
NODE = {"latency_s": 15 * MICROSECOND, "hop_s": 2 * MICROSECOND}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Shares of the data sheet.

    `flash` and `fused` are (forward, backward) shares of the 16-bit peak; `network_gbit` is what clusters of
    that generation give each device.
    """

    gemm_half: float
    gemm_fp8: float
    flash: tuple[float, float]
    memory: float
    units: int
    network_gbit: float


def _generation(
    gemm_half: float, gemm_fp8: float, flash: tuple[float, float], memory: float, units: int, gbit: float
) -> Generation:
    return Generation(
        gemm_half=gemm_half, gemm_fp8=gemm_fp8, flash=flash, memory=memory, units=units, network_gbit=gbit
    )


GENERATIONS: dict[tuple[int, int], Generation] = {  # compute capability, newest device it was set for
    (7, 0): _generation(0.65, 0.60, (0.35, 0.30), 0.72, 80, 100),  # V100
    (8, 0): _generation(0.80, 0.70, (0.55, 0.44), 0.78, 108, 200),  # A100
    (8, 9): _generation(0.75, 0.70, (0.55, 0.44), 0.80, 128, 100),  # Ada
    (9, 0): _generation(0.70, 0.59, (0.50, 0.43), 0.66, 132, 400),  # H100, H200: measured
    (10, 0): _generation(0.50, 0.53, (0.44, 0.36), 0.66, 148, 400),  # B200, GB200
    (10, 3): _generation(0.58, 0.64, (0.50, 0.40), 0.70, 148, 400),  # B300, GB300
    (12, 0): _generation(0.75, 0.70, (0.55, 0.45), 0.80, 170, 100),  # RTX 50
}
OTHER = _generation(0.55, 0.50, (0.35, 0.25), 0.75, 228, 400)  # other makers: a guess from few rows
PCIE_4 = 32e9  # bytes a second in one direction, for a device whose sheet does not say
COPY_SHARE = 0.85  # of it, by long copies from and to pinned memory
HOST_SHARE = 0.375  # of one direction of PCIe, by collectives whose bytes pass through host memory
LINK_SHARE = 0.76  # of one direction of the data sheet, by large collectives in a node
NETWORK_SHARE = 0.80
ETHERNET_GBIT = 100  # of a node besides its InfiniBand, as in DGX A100 and H100; all its devices share it


def rates_of(
    hardware: Hardware,
    *,
    gpus_per_node: int = 8,
    network_gbit: float | None = None,
    measured: Mapping[str, MeasuredLinks] | None = None,
) -> Rates:
    """The calibrated rates of a device.

    Args:
        gpus_per_node: devices that share NVLink (72 in an NVL72 rack).
        network_gbit: gigabits a second each device can send to other nodes; None takes its generation's.
        measured: links by card, as `read_links` finds them; a card that is not there has the listed ones.

    Raises: ConfigError for a device without a data sheet.
    """
    half = hardware.peak("bf16") or hardware.peak("fp16")
    if half is None or hardware.bandwidth_bytes_per_s is None:
        raise ConfigError(
            f"there is no data sheet of {hardware.name}: its step time cannot be predicted.",
            why="a prediction needs its peak rates and its memory's bandwidth.",
            mend="name the device that will run it, for example --gpu h100.",
        )
    known = _calibrated(hardware.compute_capability)
    single = hardware.peak("fp32") or half / 8
    link = hardware.link_bytes_per_s
    inside = Link(bytes_per_s=link / 2 * LINK_SHARE, **NODE) if link else host_link(hardware)
    return Rates(
        peak={"bf16": half, "fp16": half, "fp32": single, "fp64": hardware.peak("fp64") or single / 32}
        | {"fp8": hardware.peak("fp8") or half},
        gemm={"bf16": known.gemm_half, "fp16": known.gemm_half, "fp8": known.gemm_fp8}
        | {"fp32": 0.7, "fp64": 0.7},
        attention={"flash": known.flash, "fused": known.flash, "local": known.flash},
        bytes_per_s=hardware.bandwidth_bytes_per_s * known.memory,
        units=known.units,
        kernel_s=2.5 * MICROSECOND,
        node=inside,
        network=_network(network_gbit or known.network_gbit),
        gpus_per_node=gpus_per_node,
        host_bytes_per_s=copy_bytes_per_s(hardware) or COPY_SHARE * PCIE_4,
        collectives=_collectives(hardware, measured or {}),
    )


def copy_bytes_per_s(hardware: Hardware) -> float | None:
    """Of long copies from and to pinned host memory, one direction; None where PCIe's rate is not known."""
    return None if hardware.pcie_bytes_per_s is None else COPY_SHARE * hardware.pcie_bytes_per_s


def _collectives(hardware: Hardware, measured: Mapping[str, MeasuredLinks]) -> dict[str, Link]:
    """Each measured collective's link: its start for so many ranks, and a hop more for each further one."""
    links = links_of(hardware.name, measured)
    if links is None:
        return {}
    hop_s = NODE["hop_s"]
    return {
        kind: Link(
            bytes_per_s=line.bytes_per_s,
            latency_s=max(0.0, line.alpha_s - hop_s * (links.ranks - 1)),
            hop_s=hop_s,
        )
        for kind, line in links.lines.items()
    }


def host_link(hardware: Hardware) -> Link:
    """Between devices of a node through host memory, where NVLink is missing or switched off."""
    return Link(bytes_per_s=(hardware.pcie_bytes_per_s or PCIE_4) * HOST_SHARE, **NODE)


def socket_link(gpus_per_node: int, ethernet_gbit: float = ETHERNET_GBIT) -> Link:
    """Between nodes over TCP: each device's part of the node's Ethernet (starts as quick as InfiniBand's)."""
    return _network(ethernet_gbit / gpus_per_node)


def _network(gbit: float) -> Link:
    return Link(
        bytes_per_s=gbit * GIGABIT * NETWORK_SHARE, latency_s=40 * MICROSECOND, hop_s=15 * MICROSECOND
    )


def _calibrated(capability: tuple[int, int] | None) -> Generation:
    """The newest listed generation that is no newer than the device; other makers' devices have their own."""
    older = [listed for listed in GENERATIONS if capability is not None and listed <= capability]
    return GENERATIONS[max(older)] if older else OTHER
