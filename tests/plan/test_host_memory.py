"""Memory of the host: what a run takes of it, and what is said where it has less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redline.config import parse_args
from redline.formulas.host import ACTIVATIONS, ROUNDING, SNAPSHOT, pinned_rounding, snapshot_bytes
from redline.formulas.state import StateDtypes
from redline.hardware import Hardware, hardware_named
from redline.plan import Plan, make_plan
from redline.plan.host_memory import host_need, host_shares, host_warning, ranks_of_a_host
from redline.plan.lighter import lighter_changes
from redline.units import GIB

LLAMA = "--preset llama3-8b --seq-length 8192 --train-iters 1"
CPU = Hardware(name="a CPU", kind="cpu", memory_bytes=1 << 40)


def planned(flags: str = "", hardware: Hardware | None = None, ranks: int = 1) -> Plan:
    found = hardware or hardware_named("h200", 8)
    assert found is not None
    return make_plan(parse_args(f"{LLAMA} {flags}".split()).config, found, 128_256, ranks)


def h200(num_devices: int = 8) -> Hardware:
    found = hardware_named("h200", num_devices)
    assert found is not None
    return found


def test_pinned_buffers_are_powers_of_two() -> None:
    assert pinned_rounding([0, 1, 2, 3, 1 << 20, (1 << 20) + 1]) == 1 + (1 << 20) - 1


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 12),
        ({"snapshot_moments": False}, 4),
        ({"remainder": True}, 12 + 4),
        ({"exp_avg": "bf16", "exp_avg_sq": "bf16"}, 8),
        ({"exp_avg": "fp8", "exp_avg_sq": "fp8"}, 4 + 4 + 4),
        ({"snapshot_ranks": 4}, 3),
        ({"snapshot_ranks": 4, "shards": 4, "remainder": True}, 3 + 1),
        ({"snapshot_ranks": 0}, 0),
    ],
)
def test_bytes_of_a_snapshot(changes: dict[str, object], each: int) -> None:
    """Main parameters and moments as a checkpoint has them, and what is joined or decoded for it before."""
    dtypes = replace(StateDtypes(snapshot_ranks=1), **changes)  # type: ignore[arg-type]
    assert snapshot_bytes(1 << 10, dtypes) == each << 10


def test_a_snapshots_buffers_are_pinned_and_round() -> None:
    """One a tensor and state: of each layer's matrices those of MLP are 224 MiB, and take 256."""
    found = {flags: planned(flags, ranks=ranks).memory.fullest.host.get(ROUNDING, 0) for flags, ranks in (
        ("", 1), ("--no-save-optim", 1), ("--use-precision-aware-optimizer", 1), ("--no-async-save", 1),
        ("--optimizer-cpu-offload", 1), ("--use-distributed-optimizer", 8),
    )}  # fmt: skip
    mlps, whole = 3 * 32 * 3 * (256 - 224 << 20), found[""]
    tables = 3 * 2 * ((1 << 31) - 4 * 128_256 * 4096)
    assert whole == mlps + tables
    assert found["--no-save-optim"] == whole // 3
    assert found["--use-precision-aware-optimizer"] == 2 * whole // 3, "main parameters are joined beside"
    assert found["--no-async-save"] == found["--optimizer-cpu-offload"] == 0
    assert found["--use-distributed-optimizer"] == pytest.approx(whole / 8, rel=1e-3)
    assert ROUNDING not in planned("", CPU).memory.fullest.host


def test_a_snapshot_is_shared_and_can_be_left_out() -> None:
    alone, four = (planned("--use-distributed-optimizer", ranks=ranks) for ranks in (1, 4))
    whole = alone.memory.fullest.host[SNAPSHOT]
    assert whole == pytest.approx(12 * alone.parameters.total, rel=1e-3)
    assert four.memory.fullest.host[SNAPSHOT] == pytest.approx(whole / 4, rel=1e-6)
    assert SNAPSHOT not in planned("--no-async-save").memory.fullest.host


def test_all_ranks_of_a_host_need_it_together() -> None:
    offload = "--optimizer-cpu-offload --cpu-offloading --cpu-offloading-num-layers 8 --no-async-save"
    plan = planned(offload, ranks=8)
    stage, hardware = plan.memory.fullest, h200()
    assert stage.host_total == stage.host_states + stage.host[ACTIVATIONS] + stage.host[ROUNDING]
    assert 0 < stage.host[ROUNDING] < stage.host[ACTIVATIONS]
    assert ranks_of_a_host(plan, hardware) == 8 and ranks_of_a_host(plan, h200(4)) == 4
    needed = host_need(plan, hardware, 8)
    assert needed == 8 * stage.host_total
    assert host_warning(plan, hardware, 8, needed) is None
    said = host_warning(plan, hardware, 8, needed - 1)
    assert said is not None and "for each of 8 ranks" in said and "GiB of optimizer states" in said
    assert "--optimizer-offload-fraction or lower --cpu-offloading-num-layers" in said
    assert "--no-async-save" not in said and "snapshot" not in said
    alone = host_warning(planned(), hardware, 1, GIB)
    assert alone is not None and "each checkpoint's snapshot), and 1.00 GiB of it are free" in alone
    assert alone.endswith("; save with --no-async-save.") and [*host_shares(planned().memory.fullest)]


def test_on_a_cpu_all_of_training_is_in_the_hosts_memory() -> None:
    plan = planned("--no-async-save --bf16", CPU, ranks=2)
    needed = 2 * plan.memory.reserved
    assert host_need(plan, CPU, 2) == needed and ranks_of_a_host(plan, CPU) == 2
    said = host_warning(plan, CPU, 2, needed - 1)
    assert said is not None and "GiB of training" in said and "run fewer processes" in said


def test_no_offload_is_advised_that_the_host_cannot_hold() -> None:
    """With room for it, it is among the changes; with less than it takes, never; the run's own needs stay."""
    config = parse_args(f"{LLAMA} --no-async-save".split()).config
    hardware = h200(1)
    plan = make_plan(config, hardware, 128_256)
    every = [lighter_changes(config, plan, hardware, 100 * GIB, 1, 1.2, limit) for limit in (None, 20 * GIB)]
    offloads = [[each for each in found if "--optimizer-cpu-offload" in each.flags] for found in every]
    assert offloads[0] and offloads[0][0].host_total > 20 * GIB
    assert every[1] and not offloads[1]
