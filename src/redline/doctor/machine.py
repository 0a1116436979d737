"""A machine as the doctor sees it: live through NVML and /sys, or from files that tools have written.

NVML gives driver, clocks, power, ECC, PCIe and NVLink of each device. Xid errors are events that NVML only
reports as they happen; past ones are in the kernel's log and are read from files. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SYS = Path("/sys")
PACKAGES = ("torch", "triton", "flash-attn", "transformer-engine", "nvidia-ml-py")
ALTERNATIVES = {"flash-attn": ("flash-attn-4", "flash_attn_3"), "triton": ("pytorch-triton",)}
THROTTLES = {  # bits of NVML's clock event reasons that cost speed
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device; None where it was not seen."""

    index: int
    name: str
    driver: str | None = None
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    clock_mhz: int | None = None
    clock_limit_mhz: int | None = None
    clock_max_mhz: int | None = None
    throttled: tuple[str, ...] = ()
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    nvlinks_active: int | None = None
    processes: int = 0
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """How two devices reach each other, in the words of `nvidia-smi topo -m`."""

    first: int
    second: int
    kind: str


@dataclass(frozen=True, slots=True)
class Nic:
    """A network port: "infiniband" (also RoCE) or "ethernet"."""

    name: str
    kind: str
    state: str
    gbit: float | None = None


@dataclass(frozen=True, slots=True)
class NcclLog:
    """What NCCL said it uses."""

    version: str | None
    network: str | None
    network_line: str
    transports: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything seen of a machine.

    Attributes:
        links: pairs of devices.
        gpus_of_node: NUMA node -> its devices, and nearest_card: device -> the closest way to a network card
            (PIX, PXB, PHB, NODE, SYS), both from `nvidia-smi topo -m`.
        unseen: what could not be seen, and why.
    """

    gpus: tuple[Gpu, ...] = ()
    links: tuple[Pair, ...] = ()
    nics: tuple[Nic, ...] = ()
    gpus_of_node: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    nearest_card: Mapping[int, str] = field(default_factory=dict)
    numa_nodes: int = 1
    bound_to_node: bool = False
    governor: str | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    nccl: NcclLog | None = None
    xids: tuple[str, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()


def live_machine(sys: Path = SYS) -> Machine:
    """This machine, without torch: NVML where nvidia-ml-py is installed, /sys, package metadata."""
    gpus, links, unseen = _nvml()
    nodes = len(list((sys / "devices/system/node").glob("node[0-9]*"))) or 1
    return Machine(
        gpus=gpus,
        links=links,
        nics=_nics(sys),
        numa_nodes=nodes,
        bound_to_node=_bound(sys),
        governor=_read(sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        packages=installed(PACKAGES),
        unseen=unseen,
    )


def installed(names: tuple[str, ...]) -> dict[str, str | None]:
    """Version of each package, or of one that takes its place; None where there is none."""
    found: dict[str, str | None] = {}
    for name in names:
        found[name] = None
        for candidate in (name, *ALTERNATIVES.get(name, ())):
            try:
                found[name] = importlib.metadata.version(candidate)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _nvml() -> tuple[tuple[Gpu, ...], tuple[Pair, ...], tuple[str, ...]]:
    try:
        import pynvml
    except ImportError:
        return (), (), ("GPUs: nvidia-ml-py is not installed",)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), (), (f"GPUs: NVML does not start ({error})",)
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(pynvml, place, handle, driver) for place, handle in enumerate(handles))
        return gpus, _pairs(pynvml, handles), ("past Xid errors: NVML reports them only as they happen",)
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any, driver: str) -> Gpu:
    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *args)
        except (nvml.NVMLError, AttributeError):
            return None

    memory, ecc = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetEccMode")
    limit, default = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    rows = ask("nvmlDeviceGetRemappedRows")
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(18)]
    known = [state for state in states if state is not None]
    # A device at rest lowers its clocks and its links; only what limits it is compared.
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "?"),
        driver=driver,
        memory_bytes=memory.total if memory else None,
        power_limit_w=limit / 1000 if limit else None,
        power_default_w=default / 1000 if default else None,
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        clock_limit_mhz=ask("nvmlDeviceGetApplicationsClock", nvml.NVML_CLOCK_SM),
        clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        throttled=tuple(text for bit, text in THROTTLES.items() if reasons & bit),
        ecc=bool(ecc[0]) if ecc else None,
        ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", 1, 1),
        remap_pending=bool(rows[2]) if rows else None,
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=len(known) or None,
        nvlinks_active=sum(known) if known else None,
        processes=len(ask("nvmlDeviceGetComputeRunningProcesses") or ()),
        temperature_c=ask("nvmlDeviceGetTemperature", 0),
    )


def _pairs(nvml: Any, handles: list[Any]) -> tuple[Pair, ...]:
    """How each pair of devices is joined, NVLink first."""
    words = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    pairs = []
    for first, one in enumerate(handles):
        for second in range(first + 1, len(handles)):
            try:
                joined = (
                    nvml.nvmlDeviceGetP2PStatus(one, handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0
                )
                level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, handles[second])
            except (nvml.NVMLError, AttributeError):
                continue
            pairs.append(Pair(first, second, "NV" if joined else words.get(level, "SYS")))
    return tuple(pairs)


def _nics(sys: Path) -> tuple[Nic, ...]:
    found = []
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        rate = (_read(port / "rate") or "").split()
        gbit = float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else None
        found.append(
            Nic(f"{port.parts[-3]}:{port.name}", "infiniband", _read(port / "state") or "unknown", gbit)
        )
    for card in sorted((sys / "class/net").glob("*")):
        if (card / "device").exists():
            speed = _read(card / "speed") or ""
            gbit = int(speed) / 1000 if speed.isdecimal() else None
            found.append(Nic(card.name, "ethernet", _read(card / "operstate") or "unknown", gbit))
    return tuple(found)


def _bound(sys: Path) -> bool:
    """Whether this process may run on the cores of one NUMA node only."""
    if not hasattr(os, "sched_getaffinity"):
        return False
    mine = os.sched_getaffinity(0)
    for node in (sys / "devices/system/node").glob("node[0-9]*"):
        if mine <= cores_of(_read(node / "cpulist") or ""):
            return True
    return False


def cores_of(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}; anything else is left out."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
