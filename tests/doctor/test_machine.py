"""Files of tools, /sys and NVML as a machine; any text is read without a crash."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.doctor import (
    Case,
    diagnose,
    live_machine,
    read_nccl_log,
    read_nvidia_smi,
    read_topology,
    read_xids,
)
from redline.doctor import machine as module
from redline.doctor.machine import cores_of

TABLE = """\
| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |
| N/A   31C    P0             71W /  500W |       4MiB /  81559MiB |      0%      Default |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:43:00.0 Off |                    0 |
| N/A   33C    P0             70W /  700W |       4MiB /  81559MiB |      0%      Default |
"""
QUERY = """\
Driver Version                            : 580.65.06
Attached GPUs                             : 1

GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    PCI
        GPU Link Info
            Link Width
                Max                       : 16x
                Current                   : 8x
    Clocks Event Reasons
        Idle                              : Active
        HW Thermal Slowdown               : Active
    FB Memory Usage
        Total                             : 81559 MiB
    ECC Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 7
            DRAM Uncorrectable            : 2
    Remapped Rows
        Pending                           : Yes
    GPU Power Readings
        Current Power Limit               : 500.00 W
        Default Power Limit               : 700.00 W
    Applications Clocks
        Graphics                          : 1200 MHz
    Max Clocks
        Graphics                          : 1980 MHz
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-55\t0\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t0-55\t0\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t56-111\t1\tN/A
NIC0\tPXB\tPXB\tSYS\t X
"""
LOG = """\
n1:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
n1:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
n1:1:1 [0] NCCL INFO Using network Socket
n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:1:1 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct
[ 1.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.
"""


def test_table() -> None:
    found = read_nvidia_smi(TABLE)
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found.gpus[0].power_limit_w == 500 and found.gpus[0].memory_bytes == 81559 << 20
    assert found.gpus[1].driver == "580.65.06"


def test_query() -> None:
    (gpu,) = read_nvidia_smi(QUERY).gpus
    assert gpu.name == "NVIDIA H100 80GB HBM3" and gpu.memory_bytes == 81559 << 20
    assert (gpu.pcie_width, gpu.pcie_width_max) == (8, 16)
    assert (gpu.power_limit_w, gpu.power_default_w) == (500, 700)
    assert (gpu.clock_limit_mhz, gpu.clock_max_mhz) == (1200, 1980)
    assert gpu.throttled == ("HW Thermal Slowdown",)
    assert gpu.ecc is True and gpu.ecc_uncorrected == 2 and gpu.remap_pending is True


def test_topology() -> None:
    machine = read_topology(TOPOLOGY)
    found = {(pair.first, pair.second): pair.kind for pair in machine.links}
    assert found == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    assert machine.nearest_card == {0: "PXB", 1: "PXB", 2: "SYS"}
    assert machine.gpus_of_node == {0: (0, 1), 1: (2,)} and machine.numa_nodes == 2


def test_topology_is_added_to_what_is_known() -> None:
    machine = read_topology(TOPOLOGY, read_nvidia_smi(TABLE))
    assert len(machine.gpus) == 2 and len(machine.links) == 3
    findings = {each.id: each for each in diagnose(Case(machine=machine)).findings}
    assert findings["RL518"].evidence.startswith("GPU 2:") and findings["RL518"].severity == "warning"
    assert "0: GPU 0 1; 1: GPU 2" in findings["RL507"].evidence


def test_older_topologies_name_their_cards() -> None:
    text = "\tGPU0\tGPU1\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA Affinity\n"
    text += "GPU0\t X\tNV12\tNODE\tSYS\t0-31\t0\nGPU1\tNV12\t X\tPXB\tSYS\t0-31\tN/A\nmlx5_0\tNODE\tPXB\t X\n"
    machine = read_topology(text)
    assert [pair.kind for pair in machine.links] == ["NV12"]
    assert machine.nearest_card == {0: "NODE", 1: "PXB"} and machine.gpus_of_node == {0: (0,)}
    assert machine.numa_nodes == 1


def test_power_cap_in_the_table_is_held_against_the_data_sheet() -> None:
    """The table prints no default limit: 500 W of an H100's 700."""
    findings = [
        each for each in diagnose(Case(machine=read_nvidia_smi(TABLE))).findings if each.id == "RL508"
    ]
    assert [each.evidence for each in findings] == ["GPU 0: 500 W of 700 W"]


def test_ecc_and_processes_of_the_table() -> None:
    text = TABLE.replace("                    0 |", "                    3 |", 1)
    text += "|    1   N/A  N/A      4242      C   python3                            70000MiB |\n"
    text += "|    0   N/A  N/A      4243      G   /usr/lib/xorg/Xorg                     4MiB |\n"
    first, second = read_nvidia_smi(text).gpus
    assert first.ecc_uncorrected == 3 and second.ecc_uncorrected == 0
    assert first.processes == 0 and second.processes == 1  # graphics does not count


def test_nccl_log() -> None:
    found = read_nccl_log(LOG)
    assert found.version == "2.27.3+cuda12.9" and found.network == "Socket"
    assert found.transports == {"P2P": 1, "SHM": 1}
    assert len(read_xids(LOG)) == 1 and "79" in read_xids(LOG)[0]


WORDS = st.sampled_from(
    ["GPU0", "GPU1", "GPU12", "X", "NV18", "SYS", "\t", "\n", " : ", "Volatile", "Max", "|", "0"]
)


@given(st.one_of(st.text(max_size=300), st.lists(WORDS, max_size=60).map(" ".join)))
@settings(max_examples=200, derandomize=True)
def test_any_text_is_read(text: str) -> None:
    read_nvidia_smi(text)
    read_nvidia_smi("Product Name : x\n" + text)
    read_topology(text)
    read_nccl_log(text)
    read_xids(text)
    cores_of(text)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_sys(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/node/node0/cpulist", "0-3")
    write(tmp_path / "devices/system/node/node1/cpulist", "4-7,9")
    write(tmp_path / "devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    write(tmp_path / "class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)")
    write(tmp_path / "class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    write(tmp_path / "class/net/eth0/device/x", "")
    write(tmp_path / "class/net/eth0/speed", "25000")
    write(tmp_path / "class/net/eth0/operstate", "up")
    found = live_machine(tmp_path)
    assert found.numa_nodes == 2 and found.governor == "powersave"
    assert [(nic.name, nic.kind, nic.gbit) for nic in found.nics] == [
        ("mlx5_0:1", "infiniband", 400.0),
        ("eth0", "ethernet", 25.0),
    ]
    assert found.packages["torch"] is not None and found.unseen
    assert cores_of("4-7,9") == {4, 5, 6, 7, 9}


class FakeNvml:  # its methods are named as pynvml names them
    """As much of pynvml as one healthy device and one that answers nothing."""

    NVML_CLOCK_SM, NVML_P2P_CAPS_INDEX_NVLINK = 1, 4
    NVMLError = type("NVMLError", (Exception,), {})

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    nvmlShutdown = nvmlInit

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if handle:
            raise self.NVMLError
        return SimpleNamespace(total=150 << 30)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError
        return int(link != 3)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 0x41

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:  # noqa: N802
        return 50


def test_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml())
    found = module.live_machine(tmp_path)
    first, second = found.gpus
    assert first.memory_bytes == 150 << 30 and first.nvlinks == 18 and first.nvlinks_active == 17
    assert first.throttled == ("hardware thermal slowdown",) and first.driver == "580.1"
    assert second.memory_bytes is None and second.nvlinks is None
    assert [pair.kind for pair in found.links] == ["SYS"]
