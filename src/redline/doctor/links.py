"""How fast ranks reach each other: the data sheets' links, less what variables, logs or topology take away.

InfiniBand switched off leaves the node's Ethernet, which all its devices share; NVLink switched off leaves
the way through host memory over PCIe. Both rates are of data sheets (plan/cost_rates.py), not a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from redline.doctor.machine import Machine
from redline.formulas.time import Link, Rates
from redline.hardware import Hardware
from redline.plan.cost_rates import ETHERNET_GBIT, host_link, socket_link

FAMILIES = ("mlx4", "mlx5")  # prefixes that stand for every card of a maker's generation
OVER_HOST = ("PIX", "PXB", "PHB", "NODE", "SYS")  # pairs of `nvidia-smi topo -m` without NVLink


def linked(
    rates: Rates, hardware: Hardware, environment: Mapping[str, str], machine: Machine | None
) -> Rates:
    """The rates with the links that NCCL is left with."""
    node, network = rates.node, rates.network
    if over_sockets(environment, machine):
        network = sockets(rates, machine)
    elif cards := named_cards(environment):
        share = min(1.0, len(cards) / rates.gpus_per_node)
        network = replace(network, bytes_per_s=network.bytes_per_s * share)
    if through_host(environment, machine):
        node, rates = slower(node, host_link(hardware)), replace(rates, collectives={})
    if environment.get("NCCL_NET_GDR_DISABLE") == "1" or environment.get("NCCL_NET_GDR_LEVEL") == "LOC":
        network = slower(network, host_link(hardware))
    return replace(rates, node=node, network=network)


def over_sockets(environment: Mapping[str, str], machine: Machine | None) -> bool:
    """Whether traffic between nodes goes over TCP."""
    asked = environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET", "").lower() == "socket"
    return asked or bool(machine and machine.nccl and machine.nccl.network == "Socket")


def through_host(environment: Mapping[str, str], machine: Machine | None) -> bool:
    """Whether traffic inside a node goes through host memory."""
    if environment.get("NCCL_P2P_DISABLE") == "1" or environment.get("NCCL_P2P_LEVEL") == "LOC":
        return True
    if machine is None:
        return False
    log = machine.nccl.transports if machine.nccl else {}
    return bool(log.get("SHM") and not log.get("P2P")) or any(p.kind in OVER_HOST for p in machine.links)


def sockets(rates: Rates, machine: Machine | None) -> Link:
    """The link that TCP leaves a device: its part of the node's fastest Ethernet port, as seen or assumed."""
    ports = [nic.gbit for nic in machine.nics if nic.kind == "ethernet" and nic.gbit] if machine else []
    tcp = socket_link(rates.gpus_per_node, max(ports, default=ETHERNET_GBIT))
    return slower(rates.network, tcp)


def slower(one: Link, other: Link) -> Link:
    """The slower of two links."""
    return min(one, other, key=lambda link: link.bytes_per_s)


def named_cards(environment: Mapping[str, str]) -> list[str]:
    """The cards that NCCL_IB_HCA names one by one; none where it excludes or names a whole family."""
    value = environment.get("NCCL_IB_HCA", "")
    names = [name for name in value.lstrip("=").split(",") if name]
    exact = (
        name.partition(":")[0] not in FAMILIES and name.partition(":")[0][-1:].isdigit() for name in names
    )
    return names if not value.startswith("^") and all(exact) else []
