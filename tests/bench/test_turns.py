"""Timing in turns, on a simulated device: a queue that runs behind a host whose threads may wake up late."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.bench.turns import HEAD_START, PATIENT_ROUNDS, TRIES, take_turns

CYCLE_S = 0.5e-9
QUERY_S = 1e-6
KERNEL_S = 60e-6


@dataclass
class Point:
    device: Device
    at: float

    def query(self) -> bool:
        self.device.host += QUERY_S
        return self.device.host >= self.at

    def elapsed_time(self, end: Point) -> float:
        assert max(self.at, end.at) <= self.device.host, "asked before the device was past it"
        return (end.at - self.at) * 1e3


class Device:
    """Seconds of the host and of the device's queue; what was asked for, in order."""

    def __init__(self) -> None:
        self.host = self.queue = 0.0
        self.asked: list[str] = []

    def launch(self, host_s: float, device_s: float) -> None:
        self.host += host_s
        self.queue = max(self.host, self.queue) + device_s

    def hold(self, cycles: int) -> None:
        self.launch(5e-6, cycles * CYCLE_S)
        self.asked.append(f"{cycles / HEAD_START:.0f}")

    def mark(self) -> Point:
        self.launch(2e-6, 0.0)
        return Point(self, self.queue)

    def finish(self) -> None:
        self.host = max(self.host, self.queue)
        self.asked.append("finish")

    def call(self, name: str, pauses_s: list[float] | None = None, waits: bool = False):
        """Two kernels; before the second the host is away for the next of `pauses_s`, or waits."""

        def run() -> None:
            self.asked.append(name)
            self.launch(5e-6, KERNEL_S)
            self.host += pauses_s.pop(0) if pauses_s else 0.0
            if waits:
                self.host = max(self.host, self.queue)
            self.launch(5e-6, KERNEL_S)

        return run


def test_providers_take_turns_at_being_first():
    device = Device()
    found = take_turns({name: device.call(name) for name in "abc"}, 4, device)
    order = "".join(each for each in device.asked if each in "abc")
    assert order == "abcbcacababc"
    assert device.asked.count("finish") == 4
    assert all(turns.seconds == pytest.approx(2 * KERNEL_S) and not turns.late_s for turns in found.values())
    assert take_turns({}, 2, device) == {}


def test_a_late_sample_is_taken_again_with_twice_the_head_start():
    """A thread that wakes late by 1.5 ms once, then by 3 ms: the device's own time stays the same."""
    device = Device()
    calls = {"late": device.call("late", [1.5e-3, 0.0, 0.0, 3e-3, 3e-3, 3e-3]), "other": device.call("other")}
    found = take_turns(calls, 3, device)
    assert found["late"].seconds == pytest.approx(2 * KERNEL_S) and not found["late"].late
    gaps = [each - 2 * KERNEL_S for each in found["late"].late_s]  # a pause, less the head start
    assert gaps == pytest.approx([0.5e-3, 2e-3, 1e-3], abs=0.1e-3)
    assert found["other"].late_s == [] and len(found["other"].valid_s) == len(found["late"].valid_s) == 3
    assert device.asked[:6] == ["1", "late", "2", "late", "1", "other"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(pauses=st.lists(st.floats(0.0, 3e-3), max_size=12), rounds=st.integers(1, 6))
def test_pauses_of_the_host_never_count(pauses, rounds):
    device = Device()
    (turns,) = take_turns({"one": device.call("one", list(pauses))}, rounds, device).values()
    assert len(turns.valid_s) == rounds and turns.seconds == pytest.approx(2 * KERNEL_S)
    assert len(turns.late_s) <= (TRIES - 1) * rounds and max(turns.late_s, default=0.0) < 4e-3


def test_a_call_that_waits_for_the_device_is_told_so():
    """No head start helps: the shortest of its samples stands, and it costs few tries."""
    device, rounds = Device(), 10
    found = take_turns(
        {"waits": device.call("waits", waits=True), "free": device.call("free")}, rounds, device
    )
    waits = found["waits"]
    assert waits.late and waits.valid_s == [] and waits.seconds == min(waits.late_s)
    assert waits.seconds == pytest.approx(2 * KERNEL_S + 5e-6)
    assert len(waits.late_s) == PATIENT_ROUNDS * TRIES + rounds - PATIENT_ROUNDS
    assert [each for each in device.asked if each.isdigit()][:TRIES] == ["1", "2", "4", "8"]
    assert not found["free"].late
