"""The rates behind --measure are those of real products and copies."""

from redline.cli.doctor_measure import measure, measure_all_reduce, measure_copy
from redline.doctor import Case, Machine, diagnose, phrases
from redline.report.doctor_text import machine_lines


def test_copy_rate_is_plausible() -> None:
    """Between a tenth of a GB/s (a very busy core) and what no CPU's memory or cache reaches."""
    assert 1e8 < measure_copy("cpu", 0.05, 1 << 22) < 1e13


def test_a_cpus_rates_are_named_as_such() -> None:
    found = measure(0.1)
    assert set(found) == {"cpu_gemm", "cpu_copy"} and all(1e7 < rate < 1e14 for rate in found.values())
    lines = list(machine_lines(Machine(measured=found), phrases("en")))
    assert len(lines) == 2 and all("a CPU has no data sheet" in line for line in lines)
    assert diagnose(Case(machine=Machine(measured=found))).findings == ()  # held against no GPU's sheet


def test_collectives_are_timed_over_processes() -> None:
    """Two Gloo processes here; NCCL where there are GPUs. All ranks stop at the same turn."""
    rate = measure_all_reduce(2, "cpu", 0.1, 1 << 18)
    assert rate is not None and 1e6 < rate < 1e12
