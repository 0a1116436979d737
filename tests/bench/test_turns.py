"""Timing in turns, on a simulated device: a queue that runs behind a host whose threads may wake up late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.bench.turns import HEAD_START, PATIENT_ROUNDS, TRIES, Turns, take_turns

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


def test_every_round_has_an_order_of_its_own():
    """Nobody is always behind the same neighbour, nor first; the next run has the same orders."""
    device, again = Device(), Device()
    found, _ = (take_turns({name: each.call(name) for name in "abc"}, 40, each) for each in (device, again))
    order = "".join(each for each in device.asked if each in "abc")
    rounds = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert len(rounds) == device.asked.count("finish") == 40 and again.asked == device.asked
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    behind = Counter(each[place : place + 2] for each in rounds for place in (0, 1))
    assert len(behind) == 6 and min(behind.values()) >= 6  # 13 on average
    assert all(turns.seconds == pytest.approx(2 * KERNEL_S) and not turns.late_s for turns in found.values())
    assert take_turns({}, 2, device) == {}


def test_who_is_ahead_by_more_than_chance():
    def turns(center, spread, count=100):
        return Turns(valid_s=[center + spread * (index % 2 * 2 - 1) for index in range(count)])

    sharp, slower, blurred = turns(1.0, 0.01), turns(1.01, 0.01), turns(1.01, 0.1)
    assert sharp.error_s == pytest.approx(1.2533 * 1.4826 * 0.01 / 10, rel=0.01)
    assert sharp.is_ahead_of(slower) and not slower.is_ahead_of(sharp)
    assert not sharp.is_ahead_of(blurred) and not sharp.is_ahead_of(sharp)
    stray = Turns(valid_s=[*slower.valid_s[:-1], 15.0])  # a job of somebody else's, once
    assert stray.error_s == pytest.approx(slower.error_s, rel=0.05) and sharp.is_ahead_of(stray)
    one, late = Turns(valid_s=[0.5]), Turns(late_s=[3.0, 2.0])
    assert one.error_s is late.error_s is None and one.is_ahead_of(late) and not late.is_ahead_of(one)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_the_error_is_that_of_the_median(seed):
    """Of many sets of normal samples: medians differ by what a set says of itself."""
    samples = np.random.default_rng(seed).normal(1.0, 0.1, (200, 60))
    errors = [Turns(valid_s=list(each)).error_s for each in samples]
    assert np.mean(errors) == pytest.approx(np.std(np.median(samples, axis=1)), rel=0.25)


def test_a_late_sample_is_taken_again_with_twice_the_head_start():
    """A thread that wakes late by 1.5 ms once, then by 3 ms: the device's own time stays the same."""
    device = Device()
    pauses = [0.0, 1.5e-3, 0.0, 3e-3, 3e-3, 3e-3]  # where it comes first, with nothing queued before it
    calls = {"late": device.call("late", pauses), "other": device.call("other")}
    found = take_turns(calls, 3, device)
    assert found["late"].seconds == pytest.approx(2 * KERNEL_S) and not found["late"].late
    gaps = [each - 2 * KERNEL_S for each in found["late"].late_s]
    # A pause, less the head start, the first kernel, and what is still queued of the try before.
    assert gaps == pytest.approx([0.45e-3, 1.95e-3, 0.9e-3], abs=0.02e-3)
    assert found["other"].late_s == [] and len(found["other"].valid_s) == len(found["late"].valid_s) == 3
    assert device.asked[4:11] == ["finish", "1", "late", "2", "late", "1", "other"]


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
    asked = list(pairwise(device.asked))
    assert [start for start, name in asked if name == "waits"][:TRIES] == ["1", "2", "4", "8"]
    free = found["free"]
    assert free.late_s == [] and len(free.valid_s) == rounds
    assert {start for start, name in asked if name == "free"} == {"1"}
