"""A sum behind another collective: who waits, and on which stream of a GPU, by stand-ins of both."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from redline.comm import Collectives, Done, Group


class Told:
    """Streams and collectives that only say what they were told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = "computing"

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def first(self, *, over: bool) -> Any:
        return mock.Mock(
            wait=lambda: self.said.append(f"{self.current} waits for the first"), is_completed=lambda: over
        )

    def all_reduce(self, *_: Any, **__: Any) -> Done:
        self.said.append(f"{self.current} begins the second")
        return Done()

    def a_stream(self, _: Any) -> Any:
        found = mock.Mock(wait_stream=lambda other: self.said.append(f"beside waits for {other}"))
        found.name = "beside"
        return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found = Told()
    monkeypatch.setattr(torch.cuda, "Stream", found.a_stream)
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.current)
    monkeypatch.setattr("redline.comm.transport.dist.all_reduce", found.all_reduce)
    return found


def across(backend: str, monkeypatch: pytest.MonkeyPatch) -> Collectives:
    monkeypatch.setattr("redline.comm.transport.dist.get_backend", lambda _: backend)
    return Collectives(Group((0, 1), 0, mock.Mock()))


def test_on_gpus_a_stream_beside_waits_and_all_ranks_begin_at_once(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first rank of one alone has summed, the computing stream has: so that is waited for too."""
    found, first = across("nccl", monkeypatch), told.first(over=False)
    assert found.can_follow(first)
    found.all_reduce_after(first, torch.ones(2))
    assert told.said == [
        "beside waits for computing", "beside waits for the first", "beside begins the second"
    ]  # fmt: skip
    assert told.current == "computing"


def test_on_cpus_it_begins_when_the_first_is_over(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    found = across("gloo", monkeypatch)
    assert not found.can_follow(told.first(over=False)) and found.can_follow(told.first(over=True))
    found.all_reduce_after(told.first(over=True), torch.ones(2))
    assert told.said == ["computing waits for the first", "computing begins the second"]
