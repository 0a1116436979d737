"""Several processes become one run: torch.distributed is opened here, and only here."""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from redline.comm.groups import Group
from redline.errors import TrainingError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the processes of a run meet.

    Attributes:
        rank, world_size: of this process.
        address, port: of the store.
        agent_store: a launcher serves the store; else rank 0 does.
        attempt: counts restarts, each of which meets anew.
        timeout_s: longest wait for the others, here and in any collective.
    """

    rank: int
    world_size: int
    address: str
    port: int
    agent_store: bool = False
    attempt: int = 0
    timeout_s: float = 900.0


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, before they are cut into axes.

    Attributes:
        control: all ranks on gloo, whatever the device: small objects and decisions.
        store: key-value store that all ranks reach, at any time and from any thread; None on one process.
    """

    rank: int = 0
    control: Group = field(default_factory=Group)
    store: Store | None = None


def open_world(meeting: Meeting, backend: str, device: torch.device) -> World:
    """Open torch.distributed on `meeting.world_size` processes; every one of them calls it.

    Args:
        backend: "nccl" or "gloo", of tensors on `device`.

    Raises: TrainingError when the others do not come in time.
    """
    timeout = timedelta(seconds=meeting.timeout_s)
    atexit.unregister(_end_threads)
    atexit.register(_end_threads)
    try:
        store = TCPStore(
            meeting.address,
            meeting.port,
            meeting.world_size,
            is_master=meeting.rank == 0 and not meeting.agent_store,
            timeout=timeout,
            wait_for_workers=False,
        )
        dist.init_process_group(
            backend,
            store=PrefixStore(f"redline/attempt_{meeting.attempt}", store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f"rank {meeting.rank} of {meeting.world_size} found no others at "
            f"{meeting.address}:{meeting.port}.",
            why=first_line(error),
            mend="start all ranks, with one MASTER_ADDR and MASTER_PORT that every node reaches.",
        ) from error
    ranks = tuple(range(meeting.world_size))
    # A connection of its own: a rank that waits in the other one must still be able to tell where it stands.
    told = TCPStore(meeting.address, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False)
    own = PrefixStore(f"redline/status_{meeting.attempt}", told)
    return World(meeting.rank, Group(ranks, meeting.rank, control), own)


def _end_threads() -> None:
    """At the end of the process: groups that only cycles still hold go, and with them Gloo's threads.

    A thread frees a collective's tensors just after those who waited for it go on, and needs the interpreter
    for that: where it comes too late, because all ranks end with what that collective told them, it aborts
    the process ("terminate called without an active exception"). A group's destructor waits for its threads.
    """
    gc.collect()


def close_world() -> None:
    """Leave torch.distributed; nothing to do on one process."""
    if dist.is_initialized():
        dist.destroy_process_group()
