"""From one process among several to a member of the run."""

from __future__ import annotations

import torch

from redline.choice import Choice
from redline.comm import Meeting, World, open_world
from redline.config import Environment, InvalidConfigError, ParallelConfig, Problem, RunConfig

SHORTEST_MINUTES = 10.0  # Megatron's default of a collective


def join_ranks(
    config: RunConfig, environment: Environment, device: torch.device
) -> tuple[World, tuple[Choice, ...]]:
    """Meet the other processes; one process alone meets nobody and opens nothing.

    Raises:
        ConfigError: the backend asked for cannot serve this device.
        TrainingError: the others do not come.
    """
    parallel = config.parallel
    backend = choose_backend(parallel.distributed_backend, device)
    if environment.world_size == 1:
        return World(), ()
    meeting = meeting_of(environment, collective_timeout_s(parallel))
    hang = f"{parallel.hang_timeout_seconds:g} s ({parallel.startup_timeout_minutes:g} min at the start)"
    why = (
        f"{environment.local_world_size} on this machine; a collective waits up to "
        f"{collective_timeout_s(parallel) / 60:g} min, a rank that hangs ends all after {hang}"
    )
    ranks = Choice("ranks", "auto", str(meeting.world_size), why)
    return open_world(meeting, backend.ran, device), (ranks, backend)


def meeting_of(environment: Environment, timeout_s: float) -> Meeting:
    """Where the processes of a launch meet, of which this is one of several."""
    assert environment.master_addr is not None and environment.master_port is not None
    return Meeting(
        rank=environment.rank,
        world_size=environment.world_size,
        address=environment.master_addr,
        port=environment.master_port,
        agent_store=environment.agent_store,
        attempt=environment.attempt,
        timeout_s=timeout_s,
    )


def collective_timeout_s(parallel: ParallelConfig) -> float:
    """Longest wait in a collective; unless stated it outlasts the start, whose own limit names the rank."""
    stated = parallel.distributed_timeout_minutes
    return 60 * (max(SHORTEST_MINUTES, parallel.startup_timeout_minutes + 1) if stated is None else stated)


def choose_backend(asked: str | None, device: torch.device) -> Choice:
    """Who carries collectives on tensors of `device`."""
    fitting = "nccl" if device.type == "cuda" else "gloo"
    if asked == "nccl" and device.type == "cpu":
        what = "--distributed-backend nccl cannot serve --device cpu."
        why, mend = "NCCL moves memory of GPUs only.", "leave it out: gloo serves CPUs."
        raise InvalidConfigError(
            [Problem("backend-serves-device", what, why, mend, ("--distributed-backend",))]
        )
    why = "as asked" if asked else "what serves this device"
    return Choice("distributed-backend", asked or "auto", asked or fitting, why)
