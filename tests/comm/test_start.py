"""Several processes become one run, and end as one."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from redline.comm import Meeting, close_world, open_world


def gloo_threads() -> int:
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum("gloo_runloop" in name.read_text() for name in names)


def open_and_close(ended: list[Callable[[], object]]) -> None:
    """A world whose groups only a cycle still holds, as the frames of an error do."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(rank=0, world_size=1, address="localhost", port=store.port, agent_store=True)
    held: list[object] = [open_world(meeting, "gloo", torch.device("cpu"))]
    held.append(held)
    assert len(ended) == 1
    close_world()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux to list its threads")
def test_no_thread_of_gloo_outlives_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that still frees what it received aborts the process: seen where all ranks end with one error."""
    ended: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", ended.append)
    open_and_close(ended)
    assert gloo_threads() > 0, "else nothing is shown"
    ended[0]()
    assert gloo_threads() == 0
