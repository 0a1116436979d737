"""What a run says its buffers hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from redline.config import parse_args
from redline.errors import TrainingError
from redline.formulas.buckets import BucketRule
from redline.hardware import Hardware, hardware_named
from redline.optim import FlatBuffers, Sharding
from redline.plan import make_plan
from redline.run.memory import (
    MemoryMeter,
    _first_sentence,
    measured_memory,
    out_of_memory_explained,
    warning_if_too_large,
    warnings_of_memory,
)

SMALL = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8"]
NUMEL = 64 * 64 + 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_states_count_once_and_a_rank_its_own_shard(dtype: torch.dtype, ranks: int) -> None:
    """Main parameters of fp32 ones are those themselves; sharded states are a rank's part of them."""
    buffers = FlatBuffers(
        nn.Linear(64, 64, dtype=dtype).named_parameters(),
        main_dtype=torch.float32,
        grad_dtype=torch.float32,
        device="cpu",
        sharding=Sharding(rule=BucketRule(size=1000, ranks=ranks), states=ranks > 1),
    )
    held = measured_memory(MemoryMeter(torch.device("cpu")), buffers, {"fp8_copies": 7, "nothing": 0})
    assert held.pop("fp8_copies") == 7 and "nothing" not in held
    own = NUMEL // ranks
    main = 0 if dtype == torch.float32 else 4 * own
    wanted = {"weights": NUMEL * dtype.itemsize, "main_params": main, "main_grads": 4 * NUMEL,
              "exp_avg": 4 * own, "exp_avg_sq": 4 * own}  # fmt: skip
    padding = 4 * 128 * ranks * 3  # at the end of a bucket, at most
    for name, size in wanted.items():
        assert size <= held[name] <= (size + padding if size else 0), name


def test_what_the_allocator_says() -> None:
    """Its first sentence; on a CPU without the place in PyTorch's source that stands before it."""
    gpu = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    cpu = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 1575911424 bytes. Error code 12 (Cannot allocate memory)\nmore"
    )
    assert _first_sentence(gpu) == "CUDA out of memory"
    assert _first_sentence(cpu).endswith("tried to allocate 1575911424 bytes")
    assert (
        _first_sentence(cpu).startswith("DefaultCPUAllocator")
        and _first_sentence("") == "an allocation failed"
    )


@pytest.mark.parametrize(("others", "warned"), [(0, False), (100 << 30, True)])
def test_a_run_is_held_against_what_is_free(
    monkeypatch: pytest.MonkeyPatch, others: int, warned: bool
) -> None:
    """On a GPU that others use too; on its own the context that this process has already is no loss."""
    hardware = hardware_named("h200")
    assert hardware is not None
    config = parse_args(
        ["--preset", "llama3-8b", "--seq-length", "8192", "--train-iters", "1", *SMALL]
    ).config
    plan = make_plan(config, hardware, 128_256)
    free = hardware.memory_bytes - plan.memory.fullest.context - others
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, hardware.memory_bytes))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    said = warning_if_too_large(config, plan, hardware)
    assert (said is not None) == warned
    assert said is None or "39.80 GiB free" in said


def test_a_run_on_the_cpu_is_held_against_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    config = parse_args(["--train-iters", "1"]).config
    hardware = Hardware(name="a CPU", kind="cpu", memory_bytes=1 << 40)
    assert warning_if_too_large(config, make_plan(config, hardware, 512), hardware) is None


def test_each_rank_is_promised_its_part_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ranks that this host has: one GPU may be all that a task sees of it."""
    hardware = hardware_named("h200", 1)
    assert hardware is not None
    config = parse_args(["--preset", "llama3-8b", "--seq-length", "8192", "--train-iters", "1"]).config
    plan, promised = make_plan(config, hardware, 512, 8), list[int]()
    monkeypatch.setattr("redline.run.memory.usable_memory", lambda: 800)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(
        "redline.run.memory.lighter_changes",
        lambda *_, host_limit_bytes, **__: (promised.append(host_limit_bytes), [])[1],
    )
    with pytest.raises(TrainingError), out_of_memory_explained(config, plan, hardware, 8):
        raise MemoryError
    assert promised == [100]


def test_the_host_is_looked_at_once_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU beside its own memory; on a CPU, whose memory it is, only where that would suffice."""
    config = parse_args(["--train-iters", "1"]).config
    free = {"bytes": 1 << 40}
    monkeypatch.setattr("redline.run.memory.available_memory", lambda: free["bytes"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    for hardware in (hardware_named("h200"), Hardware(name="a CPU", kind="cpu", memory_bytes=1 << 40)):
        assert hardware is not None
        plan, free["bytes"] = make_plan(config, hardware, 512), 1 << 40
        assert not [*warnings_of_memory(config, plan, hardware, 4)]
        free["bytes"] = 1 << 20
        (said,) = warnings_of_memory(config, plan, hardware, 4)
        assert "of the host's memory" in said and "1.00 MiB of it are free" in said
    small = Hardware(name="a CPU", kind="cpu", memory_bytes=1 << 20)
    (said,) = warnings_of_memory(config, make_plan(config, small, 512), small, 1)
    assert "a CPU has 1.00 MiB" in said
