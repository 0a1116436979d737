"""The machine: NCCL's variables, links, clocks, memory errors, NUMA, and what is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from redline.doctor.case import Case
from redline.doctor.finding import Hit, Mend
from redline.doctor.links import OVER_HOST, named_cards, slower, sockets
from redline.doctor.machine import NcclLog
from redline.doctor.registry import check
from redline.formulas.time import Link, Rates
from redline.hardware import HOPPER, Hardware, hardware_named
from redline.plan.communication import FAST_LINKS_OFF
from redline.plan.cost_rates import host_link, rates_of

WRONG_INTERFACES = ("lo", "docker", "virbr", "br-", "veth")


@check("RL009", "communication", "error", needs="environment")
def nccl_paths(case: Case) -> Iterator[Hit]:
    """9 of the twelve: NCCL kept from InfiniBand or NVLink, by the environment, or seen in its log."""
    several = case.launch is None or case.nodes > 1
    rates = _rates(case)
    network = _links(rates.network, sockets(rates, case.machine), rates.gpus_per_node)
    node = _links(rates.node, slower(rates.node, host_link(_hardware(case))), rates.gpus_per_node)
    if case.env("NCCL_IB_DISABLE") == "1":
        mend = Mend(environment={"NCCL_IB_DISABLE": "0"})
        severity = "error" if several else "hint"
        words = network | {"seen": "NCCL_IB_DISABLE=1"}
        yield Hit(at="NCCL_IB_DISABLE", words=words, severity=severity, mend=mend)  # type: ignore[arg-type]
    if (case.env("NCCL_NET") or "").lower() == "socket":
        words = network | {"seen": f"NCCL_NET={case.env('NCCL_NET')}"}
        yield Hit(at="NCCL_NET", words=words, mend=Mend(environment={"NCCL_NET": None}))
    for name, value in FAST_LINKS_OFF.items():
        if case.env(name) == value:
            words = node | {"seen": f"{name}={value}"}
            yield Hit(at=name, words=words, text="link", mend=Mend(environment={name: None}))
    log = case.machine.nccl if case.machine else None
    if log is not None:
        healthy = replace(log, network=None)
        if log.network == "Socket":
            words = network | {"seen": log.network_line}
            yield Hit(words=words, share=_saved(case, healthy), basis="basis_links")
        if log.transports.get("SHM") and not log.transports.get("P2P"):
            words = node | {"seen": f"via SHM ({log.transports['SHM']} x)"}
            share = _saved(case, replace(log, transports={}))
            yield Hit(words=words, text="link", share=share, basis="basis_links")


def _hardware(case: Case) -> Hardware:
    """The device; an H100 where it is not known, for the sake of its links."""
    found = case.hardware if case.rates else hardware_named("H100 SXM")
    assert found is not None
    return found


def _rates(case: Case) -> Rates:
    """The rates of the device's data sheet, with all its links."""
    return rates_of(_hardware(case), gpus_per_node=case.gpus_per_node)


def _links(fast: Link, slow: Link, gpus: int) -> dict[str, object]:
    """Words for a link that is not used: GB/s a device with and without it."""
    with_it, without = fast.bytes_per_s / 1e9, slow.bytes_per_s / 1e9
    times = f"{with_it / without:.0f}"
    return {"fast": f"{with_it:.3g}", "slow": f"{without:.3g}", "times": times, "gpus": gpus}


def _saved(case: Case, log: NcclLog) -> float | None:
    """Share of the step saved once NCCL's log reads so; None where no step is predicted."""
    assert case.machine is not None
    healed = replace(case, machine=replace(case.machine, nccl=log))
    if case.cost is None or healed.cost is None:
        return None
    return 1 - healed.cost.step_s / case.cost.step_s


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
    names = named_cards(case.environment)
    if not names or (case.launch is not None and case.nodes == 1):
        return None
    if len(names) >= case.gpus_per_node // 2:
        return None
    words = {"value": case.env("NCCL_IB_HCA"), "number": len(names), "gpus": case.gpus_per_node}
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
    slow = [pair for pair in case.machine.links if pair.kind in OVER_HOST]
    if not slow:
        return None
    worst = slow[0]
    words = {"pair": f"GPU{worst.first}-GPU{worst.second}", "kind": worst.kind, "number": len(slow)}
    return Hit(words=words, severity="error" if case.launch is not None and case.tp > 1 else "warning")


@check("RL507", "host", "hint", needs="machine")
def numa_binding(case: Case) -> Hit | None:
    """Several NUMA nodes, and processes that may run on any of them."""
    assert case.machine is not None
    machine = case.machine
    if machine.numa_nodes < 2 or machine.bound_to_node:
        return None
    spread = [
        f"{node}: GPU " + " ".join(map(str, gpus)) for node, gpus in sorted(machine.gpus_of_node.items())
    ]
    if spread:  # from `nvidia-smi topo -m`: which devices hang where; the binding itself is not seen
        return Hit(words={"nodes": machine.numa_nodes, "spread": "; ".join(spread)}, text="spread")
    return Hit(words={"nodes": machine.numa_nodes})


@check("RL508", "kernels", "warning", needs="machine")
def clocks(case: Case) -> Iterator[Hit]:
    """Clocks pinned, power capped, or throttled."""
    assert case.machine is not None
    for gpu in case.machine.gpus:
        where: dict[str, object] = {"gpu": gpu.index}
        known = hardware_named(gpu.name)  # the table of nvidia-smi prints no default
        usual = gpu.power_default_w or (known.power_w if known else None)
        if gpu.power_limit_w and usual and gpu.power_limit_w < 0.97 * usual:
            words = where | {"limit": f"{gpu.power_limit_w:.0f}", "default": f"{usual:.0f}"}
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
        "all_reduce": rates.node.bytes_per_s,
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


@check("RL518", "communication", "warning", needs="machine")
def far_cards(case: Case) -> Hit | None:
    """Devices whose nearest network card hangs on another part of the machine."""
    assert case.machine is not None
    near = case.machine.nearest_card
    far = sorted(gpu for gpu, kind in near.items() if kind in ("NODE", "SYS"))
    if not far:
        return None
    all_far = len(far) == len(near)
    words = {"gpus": " ".join(map(str, far)), "kind": near[far[0]]}
    return Hit(words=words, severity="hint" if all_far else None)
