"""The machine: NCCL's variables, links, clocks, memory errors, NUMA, and what is not installed."""

from __future__ import annotations

from collections.abc import Iterator

from redline.doctor.case import HOPPER, Case
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check

FAST_LINKS_OFF = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_NET_GDR_DISABLE": "1",
}
WRONG_INTERFACES = ("lo", "docker", "virbr", "br-", "veth")


@check("RL009", "communication", "error", needs="environment")
def nccl_paths(case: Case) -> Iterator[Hit]:
    """9 of the twelve: NCCL kept from InfiniBand or NVLink, by the environment, or seen in its log."""
    several = case.launch is None or case.nodes > 1
    if case.env("NCCL_IB_DISABLE") == "1":
        mend = Mend(environment={"NCCL_IB_DISABLE": "0"})
        severity = "error" if several else "hint"
        words = {"seen": "NCCL_IB_DISABLE=1"}
        yield Hit(at="NCCL_IB_DISABLE", words=words, severity=severity, mend=mend)  # type: ignore[arg-type]
    if (case.env("NCCL_NET") or "").lower() == "socket":
        words = {"seen": f"NCCL_NET={case.env('NCCL_NET')}"}
        yield Hit(at="NCCL_NET", words=words, mend=Mend(environment={"NCCL_NET": None}))
    for name, value in FAST_LINKS_OFF.items():
        if case.env(name) == value:
            words = {"seen": f"{name}={value}"}
            yield Hit(at=name, words=words, text="link", mend=Mend(environment={name: None}))
    log = case.machine.nccl if case.machine else None
    if log is not None:
        if log.network == "Socket":
            yield Hit(words={"seen": log.network_line})
        if log.transports.get("SHM") and not log.transports.get("P2P"):
            yield Hit(words={"seen": f"via SHM ({log.transports['SHM']} x)"}, text="link")


@check("RL501", "communication", "warning", needs="environment")
def nvls(case: Case) -> Hit | None:
    """Reductions inside the NVSwitch are switched off."""
    if case.env("NCCL_NVLS_ENABLE") != "0" or case.at_least(HOPPER) is False:
        return None
    return Hit(at="NCCL_NVLS_ENABLE", mend=Mend(environment={"NCCL_NVLS_ENABLE": None}))


@check("RL502", "communication", "warning", needs="environment")
def wrong_interface(case: Case) -> Hit | None:
    """NCCL's bootstrap bound to a loop-back or container bridge."""
    value = (case.env("NCCL_SOCKET_IFNAME") or "").lstrip("=")
    names = [name for name in value.split(",") if name and not name.startswith("^")]
    several = case.launch is None or case.nodes > 1
    if value.startswith("^") or not several or not any(name.startswith(WRONG_INTERFACES) for name in names):
        return None
    mend = Mend(environment={"NCCL_SOCKET_IFNAME": None})
    return Hit(at="NCCL_SOCKET_IFNAME", words={"value": value}, severity="error", mend=mend)


@check("RL503", "communication", "warning", needs="environment")
def few_cards(case: Case) -> Hit | None:
    """NCCL_IB_HCA names fewer cards than there are devices in a node."""
    value = case.env("NCCL_IB_HCA")
    if not value or value.startswith("^") or (case.launch is not None and case.nodes == 1):
        return None
    names = [name for name in value.lstrip("=").split(",") if name]
    exact = all(name.partition(":")[0][-1:].isdigit() for name in names)
    if not exact or len(names) >= case.gpus_per_node // 2:
        return None
    words = {"value": value, "number": len(names), "gpus": case.gpus_per_node}
    return Hit(at="NCCL_IB_HCA", words=words, mend=Mend(environment={"NCCL_IB_HCA": None}))


@check("RL504", "communication", "hint", needs="environment")
def pinned_algorithm(case: Case) -> Iterator[Hit]:
    """NCCL's choice of algorithm, protocol or channels is pinned."""
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS", "NCCL_BUFFSIZE"):
        if value := case.env(name):
            simple = name == "NCCL_PROTO" and value.upper() in ("LL", "LL128")
            words = {"name": name, "value": value}
            severity = "warning" if simple else "hint"
            yield Hit(at=name, words=words, severity=severity, mend=Mend(environment={name: None}))  # type: ignore[arg-type]


@check("RL505", "communication", "hint", needs="environment")
def old_error_handling(case: Case) -> Hit | None:
    """NCCL_ASYNC_ERROR_HANDLING is the old name; off, a dead rank hangs all the others."""
    old, new = case.env("NCCL_ASYNC_ERROR_HANDLING"), case.env("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    if "0" in (old, new):
        name = "NCCL_ASYNC_ERROR_HANDLING" if old == "0" else "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        mend = Mend(environment={name: None})
        return Hit(at=name, words={"name": name}, text="off", severity="warning", mend=mend)
    if old is None or new is not None:
        return None
    renamed: dict[str, str | None] = {
        "NCCL_ASYNC_ERROR_HANDLING": None,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": old,
    }
    return Hit(at="NCCL_ASYNC_ERROR_HANDLING", mend=Mend(environment=renamed))


@check("RL506", "communication", "error", needs="machine")
def pcie_in_place_of_nvlink(case: Case) -> Hit | None:
    """Devices that reach each other over PCIe or the CPUs' link."""
    assert case.machine is not None
    slow = [pair for pair in case.machine.links if pair.kind in ("PIX", "PXB", "PHB", "NODE", "SYS")]
    if not slow:
        return None
    worst = slow[0]
    words = {"pair": f"GPU{worst.first}-GPU{worst.second}", "kind": worst.kind, "number": len(slow)}
    return Hit(words=words, severity="error" if case.launch is not None and case.tp > 1 else "warning")


@check("RL507", "host", "hint", needs="machine")
def numa_binding(case: Case) -> Hit | None:
    """Several NUMA nodes, and processes that may run on any of them."""
    assert case.machine is not None
    if case.machine.numa_nodes < 2 or case.machine.bound_to_node:
        return None
    return Hit(words={"nodes": case.machine.numa_nodes})


@check("RL508", "kernels", "warning", needs="machine")
def clocks(case: Case) -> Iterator[Hit]:
    """Clocks pinned, power capped, or throttled."""
    assert case.machine is not None
    for gpu in case.machine.gpus:
        where: dict[str, object] = {"gpu": gpu.index}
        if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < 0.97 * gpu.power_default_w:
            words = where | {"limit": f"{gpu.power_limit_w:.0f}", "default": f"{gpu.power_default_w:.0f}"}
            yield Hit(words=words, text="power")
        if gpu.clock_limit_mhz and gpu.clock_max_mhz and gpu.clock_limit_mhz < 0.95 * gpu.clock_max_mhz:
            words = where | {"clock": gpu.clock_limit_mhz, "max": gpu.clock_max_mhz}
            yield Hit(words=words, text="clock")
        if gpu.throttled:
            yield Hit(words=where | {"reasons": ", ".join(gpu.throttled)}, text="throttle")


@check("RL509", "host", "error", needs="machine")
def memory_errors(case: Case) -> Iterator[Hit]:
    """ECC errors, rows waiting to be remapped, Xid errors."""
    assert case.machine is not None
    for gpu in case.machine.gpus:
        if gpu.ecc_uncorrected:
            yield Hit(words={"gpu": gpu.index, "number": gpu.ecc_uncorrected})
        if gpu.remap_pending:
            yield Hit(words={"gpu": gpu.index}, text="remap")
    for xid in case.machine.xids:
        yield Hit(words={"xid": xid}, text="xid")


@check("RL510", "host", "warning", needs="machine")
def cpu_governor(case: Case) -> Hit | None:
    """CPU cores that do not run at full clock."""
    assert case.machine is not None
    governor = case.machine.governor
    if governor is None or governor == "performance":
        return None
    severity = "warning" if governor == "powersave" else "hint"
    return Hit(words={"governor": governor}, severity=severity)  # type: ignore[arg-type]


@check("RL511", "host", "warning", needs="machine")
def pcie_width(case: Case) -> Iterator[Hit]:
    """A device that has fewer PCIe lanes than it could."""
    assert case.machine is not None
    for gpu in case.machine.gpus:
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            yield Hit(words={"gpu": gpu.index, "width": gpu.pcie_width, "max": gpu.pcie_width_max})


@check("RL512", "host", "warning", needs="machine")
def shared_device(case: Case) -> Iterator[Hit]:
    """Somebody else computes on the device."""
    assert case.machine is not None
    for gpu in case.machine.gpus:
        if gpu.processes:
            yield Hit(words={"gpu": gpu.index, "number": gpu.processes}, severity="hint")


@check("RL513", "communication", "warning", needs="machine")
def cards_down(case: Case) -> Iterator[Hit]:
    """Network cards that are down, or slower than they could be."""
    assert case.machine is not None
    for nic in case.machine.nics:
        if nic.kind == "infiniband" and "active" not in nic.state.lower():
            yield Hit(words={"name": nic.name, "state": nic.state})


@check("RL514", "kernels", "warning", needs="machine")
def missing_packages(case: Case) -> Iterator[Hit]:
    """Fast paths whose packages are not installed."""
    assert case.machine is not None
    for name, version in case.machine.packages.items():
        if version is None:
            yield Hit(words={"name": name}, text=name, severity="hint" if name != "triton" else None)


@check("RL515", "communication", "error", needs="machine")
def nvlinks_down(case: Case) -> Iterator[Hit]:
    """NVLink lanes that are not active."""
    assert case.machine is not None
    for gpu in case.machine.gpus:
        if gpu.nvlinks and gpu.nvlinks_active is not None and gpu.nvlinks_active < gpu.nvlinks:
            yield Hit(words={"gpu": gpu.index, "active": gpu.nvlinks_active, "links": gpu.nvlinks})


@check("RL516", "kernels", "warning", needs="machine")
def below_data_sheet(case: Case) -> Iterator[Hit]:
    """GEMMs or copies measured far below what this device reaches elsewhere."""
    assert case.machine is not None
    rates, measured = case.rates, case.machine.measured
    if rates is None:
        return
    expected = {
        "gemm": rates.peak["bf16"] * rates.gemm["bf16"],
        "copy": rates.bytes_per_s,
    }
    for name, value in expected.items():
        if (seen := measured.get(name)) is not None and seen < 0.85 * value:
            words = {"seen": f"{seen / 1e12:.3g}", "usual": f"{value / 1e12:.3g}"}
            yield Hit(words=words, text=name, share=1 - seen / value)


@check("RL517", "communication", "hint", needs="machine")
def slow_network(case: Case) -> Hit | None:
    """InfiniBand or RoCE ports slower than 400 Gbit/s."""
    assert case.machine is not None
    rates = [nic.gbit for nic in case.machine.nics if nic.kind == "infiniband" and nic.gbit]
    if not rates or max(rates) >= 200:
        return None
    return Hit(words={"rate": f"{max(rates):g}", "number": len(rates)})
