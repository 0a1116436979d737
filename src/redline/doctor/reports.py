"""Files that tools have written: nvidia-smi, nvidia-smi topo -m, NCCL debug logs. Any text is accepted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import islice

from redline.doctor.machine import Gpu, Machine, NcclLog, Pair

MIB = 1 << 20
LINES = 200_000  # of a log that are read
LINK_WORDS = re.compile(r"^(NV\d+|NV|PIX|PXB|PHB|NODE|SYS|X)$")
DEVICE = re.compile(r"(?:GPU|NIC|mlx\d+_)\d+")  # older releases name the cards themselves
NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
TRANSPORT = re.compile(r"\bvia (P2P|SHM|NET)\b")
XID = re.compile(r"NVRM: Xid[^\n]*|\bXid\b[^\n]{0,120}")
TABLE_NAME = re.compile(r"^\|\s+(\d+)\s+(.+?)\s+(?:On|Off|N/A|WDDM|TCC)\s*\|")
TABLE_ECC = re.compile(r"\|\s+(\d+)\s+\|\s*$")
TABLE_PROCESS = re.compile(r"^\|\s+(\d+)\s+\S+\s+\S+\s+\d+\s+\S*C\S*\s.*MiB\s*\|\s*$")
TABLE_USE = re.compile(r"(\d+)W\s*/\s*(\d+)W\s*\|\s*(\d+)MiB\s*/\s*(\d+)MiB")


def read_nvidia_smi(text: str) -> Machine:
    """A machine from the output of `nvidia-smi` (the table) or `nvidia-smi -q`."""
    if "Product Name" in text or re.search(r"^GPU [0-9A-Fa-f]{8}:", text, re.MULTILINE):
        return _query(text)
    return _table(text)


def _table(text: str) -> Machine:
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    gpus: list[Gpu] = []
    computing: list[int] = []
    for line in text.splitlines():
        if found := TABLE_NAME.match(line):
            errors = TABLE_ECC.search(line)
            gpus.append(
                Gpu(
                    index=int(found[1]),
                    name=found[2],
                    driver=driver[1] if driver else None,
                    ecc_uncorrected=int(errors[1]) if errors else None,
                )
            )
        elif gpus and (used := TABLE_USE.search(line)):
            limit, total = float(used[2]), int(used[4]) * MIB
            gpus[-1] = replace(gpus[-1], power_limit_w=limit, memory_bytes=total)
        elif process := TABLE_PROCESS.match(line):
            computing.append(int(process[1]))
    gpus = [replace(gpu, processes=computing.count(gpu.index)) for gpu in gpus]
    return Machine(gpus=tuple(gpus), xids=_xids(text))


def _query(text: str) -> Machine:
    driver = re.search(r"Driver Version\s*:\s*([\d.]+)", text)
    blocks = re.split(r"^GPU [0-9A-Fa-f]{8}:.*$", text, flags=re.MULTILINE)[1:] or [text]
    gpus = tuple(_queried(place, block, driver[1] if driver else None) for place, block in enumerate(blocks))
    return Machine(gpus=gpus, xids=_xids(text))


def _queried(index: int, block: str, driver: str | None) -> Gpu:
    sections = _sections(block)

    def number(section: str, key: str) -> float | None:
        found = re.match(r"[\d.]+", sections.get(section, {}).get(key, ""))
        return float(found[0]) if found else None

    def whole(section: str, key: str) -> int | None:
        value = number(section, key)
        return None if value is None else int(value)

    active = tuple(
        key
        for name in ("Clocks Throttle Reasons", "Clocks Event Reasons")
        for key, value in sections.get(name, {}).items()
        if value == "Active"
        and key not in ("Idle", "Applications Clocks Setting", "SW Power Cap", "Display Clock Setting")
    )
    volatile = [
        int(value)
        for key, value in sections.get("Volatile", {}).items()
        if "Uncorrect" in key and value.isdecimal()
    ]
    memory = whole("FB Memory Usage", "Total")
    return Gpu(
        index=index,
        name=sections.get("", {}).get("Product Name", "?"),
        driver=driver,
        memory_bytes=None if memory is None else memory * MIB,
        power_limit_w=number("GPU Power Readings", "Current Power Limit")
        or number("GPU Power Readings", "Requested Power Limit")
        or number("Power Readings", "Power Limit"),
        power_default_w=number("GPU Power Readings", "Default Power Limit")
        or number("Power Readings", "Default Power Limit"),
        clock_mhz=whole("Clocks", "SM"),
        clock_limit_mhz=whole("Applications Clocks", "Graphics"),
        clock_max_mhz=whole("Max Clocks", "Graphics"),
        throttled=active,
        ecc={"Enabled": True, "Disabled": False}.get(sections.get("ECC Mode", {}).get("Current", "")),
        ecc_uncorrected=sum(volatile) if volatile else None,
        remap_pending={"Yes": True, "No": False}.get(sections.get("Remapped Rows", {}).get("Pending", "")),
        pcie_width=whole("Link Width", "Current"),
        pcie_width_max=whole("Link Width", "Max"),
        temperature_c=whole("Temperature", "GPU Current Temp"),
    )


def _sections(block: str) -> dict[str, dict[str, str]]:
    """Heading -> key -> value; keys outside a heading are under ""."""
    sections: dict[str, dict[str, str]] = {"": {}}
    heading = ""
    for line in block.splitlines():
        if not line.strip():
            continue
        key, colon, value = line.strip().partition(" : ")
        if colon:
            depth = len(line) - len(line.lstrip())
            sections.setdefault(heading if depth > 4 else "", {}).setdefault(key.strip(), value.strip())
        else:
            heading = line.strip()
    return sections


def read_topology(text: str, machine: Machine | None = None) -> Machine:
    """Pairs of devices, their NUMA nodes and nearest network cards, from `nvidia-smi topo -m`.

    Args:
        machine: what is known already; the topology is added to it.
    """
    machine = machine or Machine()
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.split() for line in text.splitlines() if line.split()]
    heads = next((words for words in lines if words[0] == "GPU0" and words[1:2] != ["X"]), None)
    if heads is None:
        return machine
    columns = [word for word in heads if DEVICE.fullmatch(word)]
    pairs: list[Pair] = []
    nodes: dict[int, tuple[int, ...]] = {}
    cards: dict[int, str] = {}
    for words in lines:
        if not re.fullmatch(r"GPU\d+", words[0]) or words is heads:
            continue
        gpu = int(words[0][3:])
        kinds = dict(zip(columns, words[1:], strict=False))
        to_cards = [kind for name, kind in kinds.items() if name[:3] != "GPU" and kind in NEAR]
        if to_cards:
            cards[gpu] = min(to_cards, key=NEAR.index)
        for name, kind in kinds.items():
            if name[:3] == "GPU" and gpu < int(name[3:]) and LINK_WORDS.match(kind):
                pairs.append(Pair(gpu, int(name[3:]), kind))
        # After the links: CPU affinity, NUMA affinity, and the device's own NUMA id or N/A.
        rest = words[1 + len(columns) :]
        if len(rest) >= 2 and rest[1].isdecimal():
            node = int(rest[1])
            nodes[node] = (*nodes.get(node, ()), gpu)
    return replace(
        machine,
        links=tuple(pairs),
        gpus_of_node=nodes,
        nearest_card=cards,
        numa_nodes=max(machine.numa_nodes, len(nodes)),
    )


def read_nccl_log(text: str) -> NcclLog:
    """What NCCL reports under NCCL_DEBUG=INFO: version, network, transports of its channels."""
    version = re.search(r"NCCL version ([\w.+]+)", text)
    transports: Counter[str] = Counter()
    network, line_seen = None, ""
    for line in islice(text.splitlines(), LINES):
        if found := TRANSPORT.search(line):
            transports[found[1]] += 1
        using = re.search(r"Using network (\w+)|NET/(Socket|IB)\s*:\s*Using", line)
        if using:
            network, line_seen = using[1] or using[2], line.strip()[-160:]
    return NcclLog(version[1] if version else None, network, line_seen, dict(transports))


def _xids(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found.strip() for found in XID.findall(text)))[:8]


def read_xids(text: str) -> tuple[str, ...]:
    """Xid errors named in a kernel or NCCL log."""
    return _xids(text[:20_000_000])
