"""How long attention takes on a device: forward and backward apart, several backends turn by turn."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from redline.attention.probe import Inputs
from redline.attention.spec import Attention, Request
from redline.errors import first_line

WARMUP, WARM_S = 3, 0.1  # steps after the one that compiles, and the seconds after which they are enough
LEAST_ROUNDS, MOST_ROUNDS = 3, 30
ENOUGH_S = 0.25  # of measuring, once there are LEAST_ROUNDS
# A GPU waits so long before a round (about 3 ms), while the host launches what is timed: else the gaps before
# kernels, which a model's other work hides, would be part of attention's time.
HEAD_START_CYCLES = 6_000_000
MEAN_DOCUMENT, LONGEST_DOCUMENT = 700, 8192  # tokens, of packed rows
SPREAD = 1.2  # of the logarithm of their lengths


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians in seconds, or why there are none."""

    forward_s: float = float("inf")
    backward_s: float = float("inf")
    failed: str | None = None

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def measure(
    backends: Mapping[str, Attention], request: Request, *, most_rounds: int = MOST_ROUNDS
) -> dict[str, Timing]:
    """The time of each backend on the request's shape: warmed, then turn by turn, to share the clocks."""
    inputs = Inputs(request, document_lengths(request), request.batch)
    found: dict[str, Timing] = {}
    ready = dict(backends)
    for name, attention in backends.items():
        try:
            _warm(inputs, attention, request, WARMUP if most_rounds > 1 else 0)
        except Exception as error:  # out of memory, and whatever Triton and the packages raise
            found[name] = Timing(failed=first_line(error))
            del ready[name]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    started, rounds = time.perf_counter(), 0
    while ready and rounds < most_rounds:
        for name, pair in _round(inputs, ready, request).items():
            samples[name].append(pair)
        rounds += 1
        if rounds >= LEAST_ROUNDS and time.perf_counter() - started > ENOUGH_S:
            break
    for name, pairs in samples.items():
        found[name] = Timing(*(statistics.median(each) for each in zip(*pairs, strict=True)))
    return {name: found[name] for name in backends}


def _warm(inputs: Inputs, attention: Attention, request: Request, steps: int) -> None:
    """One step that compiles, then as many, within WARM_S."""
    inputs.step(attention)
    _finish(request)
    started = time.perf_counter()
    for _ in range(steps):
        inputs.step(attention)
        _finish(request)
        if time.perf_counter() - started > WARM_S:
            return


def document_lengths(request: Request) -> list[int]:
    """Lengths of the documents of a row: skewed where the request tells documents apart, else one.

    Many short documents and few long ones, as texts are: log-normal, of MEAN_DOCUMENT tokens in the mean.
    """
    total = request.seq_length
    if not (request.packed or request.segments):
        return [total]
    draw = random.Random(0)
    center = math.log(MEAN_DOCUMENT) - SPREAD * SPREAD / 2
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        length = round(draw.lognormvariate(center, SPREAD))
        lengths.append(max(1, min(length, left, LONGEST_DOCUMENT)))
    return lengths


def _round(
    inputs: Inputs, backends: Mapping[str, Attention], request: Request
) -> dict[str, tuple[float, float]]:
    """Seconds of one forward and one backward of each, on the device's own clock."""
    mark, marks = _marks(request), {}
    if request.device_type == "cuda":
        torch.cuda._sleep(HEAD_START_CYCLES)
    for name, attention in backends.items():
        first = mark()
        out = inputs.output(attention)
        second = mark()
        out.backward(inputs.grad_SBND)
        marks[name] = (first, second, mark())
        inputs.qkv_SBX.grad = None
    _finish(request)
    return {
        name: (_between(first, second), _between(second, third))
        for name, (first, second, third) in marks.items()
    }


def _marks(request: Request) -> Callable[[], torch.cuda.Event | float]:
    """A function that marks the present on the device's own clock."""
    if request.device_type != "cuda":
        return time.perf_counter

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return record


def _between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float) and isinstance(second, float)
        return second - first
    return float(first.elapsed_time(second)) / 1e3


def _finish(request: Request) -> None:
    if request.device_type == "cuda":
        torch.cuda.synchronize()
