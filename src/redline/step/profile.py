"""Traces of chosen steps, by torch.profiler: the capture; ledger/ reads what it wrote.

A run hands the loop a StepProfiler, or none. In a step it does not want, the loop asks it one question; in a
step it wants, the loop's turn runs marked (marks.py) under the profiler. Results are the same to the bit: the
profiler watches, and the marks compute nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from redline.data import Microbatch
from redline.ledger.marks import mark
from redline.step.loop import Action, Step
from redline.step.marks import marked, marked_action, region
from redline.step.train_step import TrainStep

LOG_LEVEL = ("KINETO_LOG_LEVEL", "99")  # the profiler's library tells stderr of every start and stop


@dataclass(frozen=True, slots=True)
class Captured:
    """A trace of `steps` (their numbers): Chrome's JSON."""

    steps: tuple[int, ...]
    content: bytes


class TorchCapture:
    """One window under torch.profiler, with the shapes of inputs.

    On a GPU the step before it warms the tracer up, which on its first use takes about a second.

    Args:
        done: is handed the trace.
        patiently: around the end of the window; a large trace takes minutes to write and to read.
    """

    def __init__(
        self,
        device: torch.device,
        done: Callable[[Captured], object],
        patiently: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._device, self._done, self._patiently = device, done, patiently
        self._profile: Any = None

    @property
    def warmup(self) -> int:
        """Steps before the window that it must see."""
        return int(self._device.type == "cuda")

    def prepare(self) -> None:
        """Get ready, before the first step of the warm-up."""
        os.environ.setdefault(*LOG_LEVEL)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begin the window."""
        if self._profile is None:
            self.prepare()
        self._wait()
        self._profile.start_trace()

    def stop(self, steps: tuple[int, ...]) -> None:
        """End the window, and hand over what it holds of these whole steps; of none, nothing."""
        with self._patiently():
            self._stop(steps)

    def _stop(self, steps: tuple[int, ...]) -> None:
        self._wait()
        self._profile.stop_trace()
        if steps:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(path))
                content = path.read_bytes()
            self._profile = None
            self._done(Captured(steps, content))
        self._profile = None

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class NsightCapture:
    """One window for Nsight Systems (`nsys profile --capture-range=cudaProfilerApi`).

    Args:
        ranges: also mark every operator and region as an NVTX range.
    """

    warmup = 0

    def __init__(self, *, ranges: bool) -> None:
        self._ranges, self._open = ranges, ExitStack()

    def prepare(self) -> None:
        """Nothing to get ready."""

    def start(self) -> None:
        """Begin the window."""
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        if self._ranges:
            self._open.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def stop(self, steps: tuple[int, ...]) -> None:
        """End the window; Nsight has what it holds."""
        self._open.close()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


Capture = TorchCapture | NsightCapture


@dataclass(frozen=True, slots=True)
class Window:
    """Steps `first` to `last`, both included, and how to capture them."""

    first: int
    last: int
    capture: Capture


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """The parts of a turn, inside their regions where the turn is marked."""

    marks: bool

    def step(self, step: Step) -> Step:
        """The step, a region from end to end."""
        return region(mark("region", "step"), step) if self.marks else step

    def batches(self, stream: Iterator[Sequence[Microbatch]]) -> Iterator[Sequence[Microbatch]]:
        """The stream, the wait for its next item being a region."""
        if not self.marks:
            return stream
        return _waiting(stream)

    def actions(self, actions: Sequence[Action]) -> Sequence[Action]:
        """The actions, each a region."""
        return [marked_action(action) for action in actions] if self.marks else actions


def _waiting(stream: Iterator[Sequence[Microbatch]]) -> Iterator[Sequence[Microbatch]]:
    with record_function(mark("host", "data")):
        microbatches = next(stream)
    yield microbatches


class StepProfiler:
    """Captures the steps of its windows.

    Args:
        step: whose parts are marked.
        windows: in order, none overlapping.

    Attributes:
        busy: whether the step that runs now is captured, or warms the tracer up.
    """

    def __init__(self, step: TrainStep, windows: Iterable[Window]) -> None:
        self._step = step
        self._windows = list(windows)
        self._whole: list[int] = []  # steps of the open window that are over
        self._open = False
        self._marks = ExitStack()
        self.busy = False

    def add(self, window: Window) -> bool:
        """Capture a further window, unless one is open or begins to warm up before it ends; says whether."""
        if self._open or self.wants(window.last):
            return False
        self._windows.insert(0, window)
        return True

    def wants(self, number: int) -> bool:
        """Whether step `number` must run through `turn`."""
        return bool(self._windows) and number >= self._windows[0].first - self._windows[0].capture.warmup

    @contextmanager
    def turn(self, number: int) -> Iterator[TurnMarks]:
        """Around one turn of the loop: from the wait for step `number`'s data to the end of its actions."""
        window = self._windows[0]
        self.busy = True
        if number < window.first:
            window.capture.prepare()
            yield TurnMarks(marks=False)
        else:
            if not self._open:  # before the first step's mark: it is no part of the step
                self._marks.enter_context(marked(self._step))
                window.capture.start()
                self._open = True
                with record_function(mark("region", "start")):
                    pass  # the first mark of a window takes a millisecond to set up
            with record_function(mark("step", number)):
                yield TurnMarks(marks=True)
            self._whole.append(number)
        self.busy = False
        if number >= window.last:
            self.close()

    def close(self) -> None:
        """End the open window, if any, and hand over the whole steps it has."""
        if self._open:
            # Gloo's threads note the end of a collective in the tracer, which must still be there: seen, with
            # gathers under way, as a segmentation fault.
            self._step.state.optimizer.settle()
        self._end(tuple(self._whole))

    def abandon(self) -> None:
        """End the open window, if any; a step has failed, and nothing is handed over."""
        self._end(())

    def _end(self, steps: tuple[int, ...]) -> None:
        if not self._open:
            return
        window = self._windows.pop(0)
        self._whole, self._open = [], False
        self._marks.close()
        window.capture.stop(steps)
