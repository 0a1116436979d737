"""Detection: what a container may use, not what its host has."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from redline.errors import ConfigError
from redline.hardware import detect, detect_cpu, with_measured_peak
from redline.hardware.detect import available_memory, cpu_name, usable_cores, usable_memory

MEMINFO = "MemTotal:       16384000 kB\nMemFree:         1000000 kB\n"
TOTAL = 16384000 * 1024


@pytest.fixture
def machine(tmp_path):
    """A /proc and a /sys/fs/cgroup that say what a test writes into them."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text(MEMINFO)
    return proc, cgroup


def write(root, path, text):
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_without_limits_the_whole_machine(machine):
    proc, cgroup = machine
    assert usable_memory(proc, cgroup) == TOTAL


def test_memory_limit_of_cgroup_2_is_the_tightest_on_the_way_up(machine):
    proc, cgroup = machine
    write(proc, "self/cgroup", "0::/pod/container\n")
    write(cgroup, "pod/memory.max", "1073741824\n")
    write(cgroup, "pod/container/memory.max", "max\n")
    assert usable_memory(proc, cgroup) == 1 << 30


def test_memory_limit_of_cgroup_1(machine):
    proc, cgroup = machine
    write(proc, "self/cgroup", "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n")
    write(cgroup, "memory/docker/abc/memory.limit_in_bytes", "2147483648\n")
    assert usable_memory(proc, cgroup) == 2 << 30


def test_a_limit_above_the_machine_is_no_limit(machine):
    proc, cgroup = machine
    write(cgroup, "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert usable_memory(proc, cgroup) == TOTAL


@pytest.mark.parametrize(
    ("path", "text"),
    [("cpu.max", "50000 100000\n"), ("cpu/cpu.cfs_quota_us", "100000\n")],
    ids=["version 2", "version 1"],
)
def test_a_cpu_quota_limits_cores(machine, path, text):
    proc, cgroup = machine
    write(cgroup, path, text)
    write(cgroup, "cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(proc, cgroup) == 1


@pytest.mark.parametrize("text", ["max 100000\n", "garbage\n", ""])
def test_no_quota_leaves_the_affinity(machine, text):
    proc, cgroup = machine
    free = usable_cores(proc, cgroup)
    write(cgroup, "cpu.max", text)
    assert usable_cores(proc, cgroup) == free >= 1


def test_cpu_name(machine):
    proc, _ = machine
    assert cpu_name(proc)  # no cpuinfo: something is still said
    write(proc, "cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_name(proc) == "Some CPU @ 3 GHz"


def test_this_machine():
    found = detect_cpu()
    assert found.kind == "cpu" and found.memory_bytes > 0 and found.cores >= 1
    assert found.peak("fp32") is None and found.peak_source == ""
    assert detect("cpu") == found


def test_devices_that_do_not_exist():
    with pytest.raises(ConfigError, match="--device tpu"):
        detect("tpu")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            detect("cuda")
        assert detect("auto").kind == "cpu"


def test_a_cpu_gets_a_measured_peak(monkeypatch):
    """The best of several products, by a clock on which they take 20, 10, 30, ... ms; said to be measured."""
    took = iter([0.02, 0.01, 0.03, 0.02])
    clock = itertools.accumulate(itertools.chain.from_iterable((0.0, each) for each in took))
    monkeypatch.setattr("redline.hardware.measure.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    machine = with_measured_peak(detect_cpu(), "fp32", seconds=0.05)
    assert machine.peak("fp32") == pytest.approx(2 * 768**3 / 0.01, rel=1e-9)
    assert "measured" in machine.peak_source
    assert with_measured_peak(machine, "fp32") is machine


def test_a_known_peak_is_not_measured_again():
    machine = detect_cpu().with_peak("bf16", 1e12, "sheet").with_peak("fp32", 1e11, "sheet")
    assert machine.peak_source == "sheet" and machine.peak("bf16") == 1e12


def test_no_torch_for_a_cpu():
    code = (
        "import sys; import redline.hardware as h; h.detect('cpu'); h.hardware_named('h100');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


AVAILABLE = f"{MEMINFO}MemAvailable:    8192000 kB\n"


def test_what_is_free_is_what_the_kernel_says(machine):
    """Page cache that it would give back included: MemAvailable, not MemFree."""
    proc, cgroup = machine
    write(proc, "meminfo", AVAILABLE)
    assert available_memory(proc, cgroup) == 8192000 * 1024


def test_a_limit_of_cgroup_2_leaves_what_is_not_in_use(machine):
    """The tightest on the way up; pages of files do not count against it, however often they were read."""
    proc, cgroup = machine
    write(proc, "meminfo", AVAILABLE)
    write(proc, "self/cgroup", "0::/pod/container\n")
    write(cgroup, "pod/memory.max", f"{4 << 30}\n")
    write(cgroup, "pod/memory.current", f"{3 << 30}\n")
    write(
        cgroup,
        "pod/memory.stat",
        f"anon 7\nfile {4 << 30}\nshmem {2 << 30}\ninactive_file {1 << 29}\nactive_file {1 << 29}\n",
    )
    write(cgroup, "pod/container/memory.max", "max\n")
    write(cgroup, "pod/container/memory.current", f"{3 << 30}\n")
    assert available_memory(proc, cgroup) == 2 << 30
    write(cgroup, "pod/memory.current", f"{6 << 30}\n")
    assert available_memory(proc, cgroup) == 0, "a limit lowered below what is in use leaves nothing"


def test_a_limit_of_cgroup_1_leaves_what_is_not_in_use(machine):
    proc, cgroup = machine
    write(proc, "meminfo", AVAILABLE)
    write(proc, "self/cgroup", "4:memory:/docker/abc\n")
    write(cgroup, "memory/docker/abc/memory.limit_in_bytes", f"{3 << 30}\n")
    write(cgroup, "memory/docker/abc/memory.usage_in_bytes", f"{2 << 30}\n")
    write(
        cgroup,
        "memory/docker/abc/memory.stat",
        f"inactive_file 5\ntotal_inactive_file {1 << 28}\ntotal_active_file {1 << 28}\n",
    )
    assert available_memory(proc, cgroup) == (1 << 30) + (1 << 29)


def test_without_limits_of_a_cgroup_the_machine_counts(machine):
    proc, cgroup = machine
    write(proc, "meminfo", AVAILABLE)
    write(cgroup, "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup, "memory/memory.usage_in_bytes", "4096\n")
    assert available_memory(proc, cgroup) == 8192000 * 1024
