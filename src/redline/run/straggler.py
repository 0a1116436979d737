"""Looks for slow ranks while the run goes on (`--log-straggler`)."""

from __future__ import annotations

from redline.comm import Group, gathered
from redline.ledger import Skew
from redline.ledger.statistics import WARMUP_STEPS
from redline.step import StepOutcome


class StragglerWatch:
    """Adds up a rank's own time and compares it with the others'; every rank has one.

    Args:
        control: all ranks, on the CPU.

    Attributes:
        whole: of all steps compared so far; None before the first comparison.
    """

    def __init__(self, control: Group) -> None:
        self._control = control
        self._seen = self._steps = self._all_steps = 0
        self._own_s = 0.0
        self._all_s = [0.0] * control.size
        self.whole: Skew | None = None

    def add(self, outcome: StepOutcome, *, profiled: bool) -> None:
        """Take in one step; the first ones and profiled ones tell nothing."""
        self._seen += 1
        if self._seen > WARMUP_STEPS and not profiled and outcome.own_s is not None:
            self._steps += 1
            self._own_s += outcome.wait_s + outcome.own_s

    def look(self, step: int) -> Skew | None:
        """The steps since the last look; all ranks call it together. None where there were none."""
        steps, self._steps = self._steps, 0
        own_s, self._own_s = self._own_s, 0.0
        if not steps:
            return None
        times = gathered(self._control, own_s)
        self._all_steps += steps
        self._all_s = [before + now for before, now in zip(self._all_s, times, strict=True)]
        self.whole = Skew(step, tuple(each / self._all_steps for each in self._all_s))
        return Skew(step, tuple(each / steps for each in times))
