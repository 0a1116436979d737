"""Ranks of one start, which do row after row together: each is kept as it comes, each has its limit.

Where a row takes too long the first rank writes its stacks and ends, and so do the others as the launcher
ends them; it starts all of them again (`--max-restarts`), and they go on behind that row: what is in the file
is not tried twice. Meanwhile the file says how far the row has come, so that a cut from outside leaves that.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parallel_rows import Row
from torch.distributed import distributed_c10d

from redline.bench.record import write_result
from redline.comm import Group, Groups, Meeting, Progress, World, close_world, every, open_groups, open_world
from redline.config import Environment, read_environment
from redline.errors import ConfigError
from redline.run.ranks import meeting_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEAT_S = 5.0  # between two looks at a row under way
SHORTEST_S = 6.0  # less is left of the stage: no row begins


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop.

    Attributes:
        row_s: longest row.
        until: seconds since the epoch at which the stage is over.
        stacks: folder where each rank writes where it stood.
    """

    row_s: float
    until: float
    stacks: Path

    @property
    def left_s(self) -> float:
        """Of the stage."""
        return self.until - time.time()


class OneMeeting:
    """Ranks that have met stay together, and each set of groups is made once, whatever rows follow.

    Within, `open_run` on all ranks finds what an earlier row has opened.
    """

    def __init__(self) -> None:
        self._world: World | None = None
        self._groups: dict[str, Groups] = {}
        self._patches = [
            mock.patch("redline.run.ranks.open_world", self.world),
            mock.patch("redline.run.opening.open_groups", self.groups),
        ]

    def __enter__(self) -> OneMeeting:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def world(self, meeting: Meeting, *how: Any) -> World:
        """`open_world`, once."""
        if self._world is None:
            name_anew(meeting.attempt)
            self._world = open_world(meeting, *how)
        return self._world

    def groups(self, tp: Any, dp: Any, *more: Any, progress: Progress | None = None, **how: Any) -> Groups:
        """`open_groups`, once for each layout."""
        key = str((tp, dp, how))
        if key not in self._groups:
            self._groups[key] = open_groups(tp, dp, *more, progress=progress, **how)
        found = self._groups[key]
        named = {name: getattr(found, name) for name in ("control", "tp", "dp", "shard", "replica")}
        return replace(found, **{name: replace(group, progress=progress) for name, group in named.items()})

    def end(self) -> None:
        """Part; whoever needs the others meets them anew."""
        self._world = None
        self._groups.clear()
        close_world()


def name_anew(meeting: int) -> None:
    """Give the process groups of each meeting names of their own.

    PyTorch keeps symmetric memory by the name of its group, and counts names from 0 after each parting: what
    two ranks once shared would be taken for that of the four which are "3" now.
    """
    distributed_c10d._world.group_count = 100 * meeting


class Job:
    """The ranks of one start.

    Args:
        out: file of the rows; case: what they are about.
        only: regular expression of the rows that are wanted.

    Attributes:
        progress: of the run that is open, once it is.
    """

    def __init__(self, out: Path, case: str, only: str, limits: Limits) -> None:
        self.environment, self._out, self._case, self._limits = read_environment(), out, case, limits
        self._only, self._start_s, self._skipped = re.compile(only), time.monotonic(), 0
        self.leads, self.size = self.environment.rank == 0, self.environment.world_size
        self._attempts = count(self.environment.attempt * 1000)
        self._meeting, self._lock = OneMeeting(), threading.Lock()
        self._open: str | None = None  # the row under way
        self._doing, self.progress = "", None
        start = self.environment.attempt
        before = json.loads(out.read_text())["results"] if out.exists() and start else []
        self._rows: list[Row] = before
        # Only of earlier starts: the first rank may be at a row already when another one reads the file.
        self._done = {row["row"]: row for row in before if row["start"] < start}
        limits.stacks.mkdir(parents=True, exist_ok=True)
        self._stacks = (limits.stacks / f"{case}-rank-{self.environment.rank}").open("a")
        faulthandler.enable(file=self._stacks)
        faulthandler.register(signal.SIGTERM, file=self._stacks, chain=True)
        self._arm(limits.left_s)
        threading.Thread(target=self._look, daemon=True).start()

    def row(self, name: str, work: Callable[[], Row | None], *, wanted: bool = False) -> Row | None:
        """Keep what `work` finds as the row of that name; what an earlier start found where it has tried it.

        Args:
            wanted: whatever `only` says.
        """
        if name in self._done:
            return self._done[name]
        if not (wanted or self._only.search(name)):
            return None
        if self._limits.left_s < SHORTEST_S:
            self._skipped += 1
            return None
        started, row = time.monotonic(), {"row": name, "start": self.environment.attempt}
        self._begin(name, row)
        try:
            found = work() or {}
        except ConfigError as error:  # refused, on all ranks alike, before anything was sent
            found = {"refused": f"{error}"[:600]}
        except Exception as error:  # all ranks find it together, or its limit ends them
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
            self._meeting.end()
        self._end({**row, **found, "took_s": round(time.monotonic() - started, 1)})
        return found

    def close(self) -> None:
        """Say what was left out, and part."""
        faulthandler.cancel_dump_traceback_later()
        if self._skipped and self.leads:
            self.say(f"{self._skipped} rows not tried: the limit of the stage has come")
        self._meeting.end()

    def say(self, words: object) -> None:
        """One line with the time since this start."""
        at = time.monotonic() - self._start_s
        print(f"[{at:6.1f} s] rank {self.environment.rank}, {self._case}: {words}", flush=True)

    def doing(self, what: str, progress: Progress | None = None) -> None:
        """What comes next in the row, for whoever looks; a run's own progress says more."""
        self._doing, self.progress = what, progress

    def on_all(self, work: Callable[[Environment], Any]) -> Any:
        """What this rank finds where all of them work together; none leaves before all have ended."""
        environment = replace(self.environment, attempt=next(self._attempts))
        with self._meeting:
            found = self._cleanly(work, environment)
        self.doing("waiting for the others to end")
        if dist.is_initialized():
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            self._together(lambda: None)
        return found

    def on_first(self, number: int, work: Callable[[Environment], Any]) -> Any:
        """What this rank finds where the first so many work together; None on the rest, which go on."""
        if number == self.size:
            return self.on_all(work)
        attempt = next(self._attempts)
        if number > 1:
            self._meeting.end()
        if self.environment.rank >= number:
            return None
        few = replace(self.environment, world_size=number, local_world_size=number, attempt=attempt)
        if number == 1:  # no groups, and those of all ranks stay: they must go on naming groups alike
            return self._cleanly(work, few)
        name_anew(attempt)
        try:
            return self._cleanly(work, few)
        finally:
            close_world()

    def apart(self, works: list[Callable[[Environment], Any]]) -> list[Any]:
        """What each of `works` finds alone, a GPU each, as many at once as there are, or why it failed.

        Returns: the same on every rank.
        """
        alone = replace(self.environment, rank=0, world_size=1, local_world_size=1)
        mine = {}
        for number in range(self.environment.rank, len(works), self.size):
            try:
                mine[number] = self._cleanly(works[number], alone)
            except Exception as error:  # the others wait for what this rank finds
                mine[number] = {"error": f"{type(error).__name__}: {error}"[:600]}
        found: dict[int, Any] = {}
        self.doing("exchanging what each has found alone")
        for each in self._together(lambda: mine):
            found |= each
        return [found[number] for number in range(len(works))]

    def met(self) -> World:
        """All ranks, without a run."""
        environment = replace(self.environment, attempt=next(self._attempts))
        device = torch.device(DEVICE, environment.local_rank if DEVICE == "cuda" else None)
        if DEVICE == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        return self._meeting.world(meeting_of(environment, timeout_s=900.0), backend, device)

    def world_group(self) -> Group:
        """All ranks on the backend of the device."""
        return Group(self.met().control.ranks, self.environment.rank, dist.group.WORLD)

    def _together(self, make: Callable[[], Any]) -> list[Any]:
        return every(self.met().control, make)

    def _begin(self, name: str, row: Row) -> None:
        self.doing("beginning")
        # The others may wait for the first one's rows alone; they end with it.
        self._arm(min(self._limits.row_s, self._limits.left_s) if self.leads else self._limits.left_s)
        with self._lock:
            self._open, self._row_began = name, time.monotonic()
            self._rows.append({**row, "error": "it did not end: beginning"})
            self._keep()

    def _end(self, row: Row) -> None:
        self._arm(self._limits.left_s)
        with self._lock:
            self._open = None
            self._rows[-1] = row
            self._keep()
        if self.leads:
            self.say({key: value for key, value in row.items() if not isinstance(value, dict | list)})

    def _arm(self, seconds: float) -> None:
        """Then this process writes its stacks and ends, wherever it stands: no Python is needed for it."""
        faulthandler.dump_traceback_later(max(seconds, 1.0), exit=True, file=self._stacks)

    def _keep(self) -> None:
        if self.leads:
            write_result(self._out, f"parallel-{self._case}", DEVICE, self._rows, os.environ.get("COMMIT"))

    def _look(self) -> None:
        """Say where a long row stands, and leave that in the file in case it is cut."""
        while True:
            time.sleep(BEAT_S)
            with self._lock:
                if self._open is None or time.monotonic() - self._row_began < BEAT_S:
                    continue
                at = self._doing
                if self.progress is not None:
                    inside = ", ".join(filter(None, (self.progress.operation, self.progress.collective)))
                    at = f"{at}: step {self.progress.step}, {inside}"
                self.say(f"{self._open}: {at}")
                self._rows[-1]["error"] = f"it did not end: {at}"
                self._keep()

    @staticmethod
    def _cleanly(work: Callable[[Environment], Any], environment: Environment) -> Any:
        try:
            return work(environment)
        finally:
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
