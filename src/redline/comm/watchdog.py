"""A rank that dies or stands still ends the whole job, with its name: no hang without a cause.

A thread of every rank tells the store, twice a second, where its rank stands: step, last operation, and a
beat that shows that the process lives. It ends its own process, whatever the main thread waits for, when

    its rank has begun nothing new for longer than the limit,
    another rank's beat has stood still for longer than the limit (rank 0 watches, and tells all),
    another rank has reported its failure (a checkpoint that all are still writing is finished first),
    it is told to end (a launcher that has lost a rank does so), cannot, and another rank's beat stands still.

What it says names the rank that is behind, its step and its operation. Two limits hold: a patient one for the
start up to the end of the first step, evaluations, saves and the end of a trace, and a steady one for
everything else. The patient one holds for all ranks where it holds for one: they may wait for that one.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from torch._C._distributed_c10d import Store

from redline.comm.progress import Progress
from redline.errors import RedlineError, TrainingError, first_line

POLL_S = 0.5
BEATS = 3  # polls without a beat after which a rank is taken for dead where a collective has failed
TOLD_BEATS = 10  # the same where this rank was told to end, and for as long has not got to it
SHOWN_RANKS = 8  # that stand at one place
RECORD_S = 5.0  # for the record of a job that breaks
STDERR = 2
FAILURE = "failure"  # what all ranks end with
REPORTER = "reporter"  # where the rank stands that reported it: it still finishes a checkpoint, or has left
FINISHING, LEFT = "finishing", "left"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stood when its thread last told: for how long (`for_s`) it had been at it by then."""

    rank: int
    step: int = 0
    operation: str = "nothing yet"
    collective: str = ""
    count: int = -1
    for_s: float = 0.0
    beat: int = 0
    patient: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.place}"

    @property
    def place(self) -> str:
        """Step, operation, and the collective in it."""
        return ", ".join(filter(None, (f"step {self.step}", self.operation, self.collective)))


class Watchdog:
    """Watches over all ranks from within one; a context manager around everything they do together.

    Args:
        store: that all ranks reach; None on one process, which has nobody to wait for.
        progress: of this rank.
        steady_s, patient_s: the limits.
        end: called with the error that ends this process; it does not return.
        record: called before that, and where a collective has failed: leaves behind what is known.
        poll_s: between looks.

    Attributes:
        saving: whether this rank has a checkpoint in flight, which all ranks write together.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        progress: Progress,
        *,
        steady_s: float,
        patient_s: float,
        end: Callable[[TrainingError], None] | None = None,
        record: Callable[[], object] = lambda: None,
        poll_s: float = POLL_S,
    ) -> None:
        self._store, self._rank, self._world_size, self._progress = store, rank, world_size, progress
        self._steady_s, self._patient_s, self._poll_s = steady_s, patient_s, poll_s
        self._end, self._record = end or _end_process, record
        self.saving: Callable[[], bool] = lambda: False
        self._reported = False
        self._told: tuple[TrainingError, float] | None = None  # what another rank reported, seen when
        self._over = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}
        self._beat = 0
        self._signals = _Signals()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._store is not None:
            self._tell()
            self._signals.listen()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._signals.close()
        if self._reported and self._store is not None:
            with suppress(RuntimeError):  # the rank that served the store may be gone by now
                self._store.set(REPORTER, LEFT)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed by itself, so that they end and say why.

        This rank's own process is left to end by itself then, unless it gets stuck on the way.
        """
        self._reported = True
        if self._store is not None:
            self._store.set(REPORTER, FINISHING)
        kind = type(error).__name__
        said = error.what if isinstance(error, RedlineError) else first_line(error)
        self._tell_others(
            TrainingError(
                f"another rank has failed: {self._own()}: {kind if said == kind else f'{kind}: {said}'}",
                why="the ranks cannot go on without each other.",
                mend="mend what it names, then resume with --load and --save of the run folder.",
            )
        )

    def _tell_others(self, error: TrainingError) -> None:
        """The first error that any rank tells is what all end with."""
        if self._store is not None:
            self._store.compare_set(FAILURE, "", json.dumps([error.what, error.why, error.mend]))

    def explain(self, error: BaseException) -> TrainingError:
        """What is behind a collective that failed here: the rank that reported, or whose beat has stopped."""
        self._leave_record()
        for _ in range(5):
            try:
                found = self.lost()
            except KeyboardInterrupt:  # a launcher has noticed too
                found = self.lost()
            if found is not None:
                return found
        return TrainingError(
            f"a collective failed on {self._own()}.",
            why=first_line(error),
            mend="look at the other ranks' messages, then resume with --load and --save of the run folder.",
        )

    def lost(self) -> TrainingError | None:
        """What is known of a rank that has failed or died, after BEATS polls; None where all answer."""
        if self._store is None:
            return None
        before = {each.rank: each.beat for each in self._standings()}
        self._over.wait(BEATS * self._poll_s)
        if failure := self._failure():
            return failure
        dead = [each for each in self._standings() if each.beat == before.get(each.rank)]
        dead = [each for each in dead if each.rank != self._rank]
        return self._dead(dead) if dead else None

    def _watch(self) -> None:
        while not self._over.wait(self._poll_s):
            try:
                found = self._look()
            except Exception as lost:  # whatever the store raises: without it no rank can go on
                found = self._told[0] if self._told is not None else self._storeless(lost)
            if found is not None and not self._over.is_set():
                self._leave_record()
                self._end(found)
                return

    def _storeless(self, lost: Exception) -> TrainingError:
        return TrainingError(
            f"{self._own()} has lost the store that all ranks meet at.",
            why=f"the process that served it is gone ({first_line(lost)}).",
            mend="look at rank 0's messages, then resume with --load and --save of the run folder.",
        )

    def _leave_record(self) -> None:
        """In a thread of its own: where the library of the collectives is stuck, its record may be too."""

        def leave() -> None:
            try:
                self._record()
            except RedlineError as error:
                os.write(STDERR, f"{error}\n".encode())

        thread = threading.Thread(target=leave, name="flight record", daemon=True)
        thread.start()
        thread.join(RECORD_S)

    def _look(self) -> TrainingError | None:
        self._tell()
        if not self._reported and (failure := self._failure()):
            return None if self._finishes(failure) else failure
        stuck_s, limit_s = time.monotonic() - self._progress.since, self._limit_s()
        if stuck_s > limit_s:
            standings = self._standings()
            patient = self._progress.patient or any(each.patient for each in standings)
            if not patient or stuck_s > self._patient_s:
                return self._stuck(standings, patient=patient)
        told_s = TOLD_BEATS * self._poll_s
        told = self._signals.came() and stuck_s > told_s
        if self._rank == 0 or told:
            dead = self._stopped(min(told_s, limit_s) if told else limit_s)
            if dead:
                return self._dead(dead)
        return None

    def _finishes(self, failure: TrainingError) -> bool:
        """Whether a checkpoint is still to be finished before this process ends for another rank's failure.

        That rank finishes its part too; once it has left, the checkpoint is whole or never will be.
        """
        assert self._store is not None
        now = time.monotonic()
        self._told = (failure, now) if self._told is None else self._told
        if not self.saving() or now - self._told[1] > self._patient_s:
            return False
        return self._store.check([REPORTER]) and self._store.get(REPORTER) == FINISHING.encode()

    def _limit_s(self) -> float:
        return self._patient_s if self._progress.patient else self._steady_s

    def _own(self) -> Standing:
        at = self._progress
        for_s = time.monotonic() - at.since
        return Standing(
            self._rank, at.step, at.operation, at.collective, at.count, for_s, self._beat, at.patient
        )

    def _tell(self) -> None:
        assert self._store is not None
        self._beat += 1
        own = self._own()
        told = [own.step, own.operation, own.collective, own.count, own.for_s, own.beat, own.patient]
        self._store.set(_key(self._rank), json.dumps(told))

    def _standings(self) -> list[Standing]:
        assert self._store is not None
        keys = [_key(rank) for rank in range(self._world_size)]
        there = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        return [Standing(rank, *json.loads(self._store.get(keys[rank]))) for rank in there]

    def _stopped(self, limit_s: float) -> list[Standing]:
        """The ranks whose beat has not changed for longer than the limit."""
        now, stopped = time.monotonic(), []
        for each in self._standings():
            beat, since = self._beats.get(each.rank, (-1, now))
            if each.beat != beat:
                self._beats[each.rank] = (each.beat, now)
            elif now - since > limit_s:
                stopped.append(each)
        return stopped

    def _failure(self) -> TrainingError | None:
        assert self._store is not None
        if not self._store.check([FAILURE]):
            return None
        return TrainingError(*json.loads(self._store.get(FAILURE)))

    def _dead(self, dead: list[Standing]) -> TrainingError:
        what = f"{dead[0]}, no longer answers"
        others = f"; so do {len(dead) - 1} more ranks" if len(dead) > 1 else ""
        error = TrainingError(
            f"{what}{others}.",
            why="its process has ended or is stopped, and the other ranks cannot go on without it.",
            mend="look for its last message, then resume with --load and --save of the run folder.",
        )
        self._tell_others(error)
        return error

    def _stuck(self, standings: list[Standing], *, patient: bool) -> TrainingError:
        """The others wait for the rank that has begun least; where all are as far, nobody can tell."""
        ahead = max(standings, key=_reached)
        behind = [each for each in standings if _reached(each) == _reached(min(standings, key=_reached))]
        if suspects := [each for each in behind if not each.collective]:
            behind = suspects  # who has begun to send waits for those who have not
        limit_s = self._patient_s if patient else self._steady_s
        flag = "--startup-timeout-minutes" if patient else "--hang-timeout-seconds"
        if len(behind) == len(standings) > 1:
            what = "no rank is behind the others, so which one is stuck cannot be told"
            why = f"the last that they began: {_places(standings)}."
            look = "--flight-recorder-dump-path records what each one sent"
        else:
            more = len(behind) - 1
            others = f" (and {more} more rank{'s' * (more > 1)}, as far)" if more else ""
            what = f"{behind[0]}, is furthest behind{others}"
            why = f"it began that {behind[0].for_s:.0f} s ago or more; the foremost is {ahead}."
            look = "look at that rank"
        error = TrainingError(
            f"nothing has happened for {limit_s:g} s: {what}.",
            why=why,
            mend=f"if that may take so long, raise {flag}; else {look}, then resume.",
        )
        self._tell_others(error)
        return error


class _Signals:
    """Whether a signal has come, for a thread to ask while the main one waits in a library.

    Python runs a handler in the main thread, which may never come back; the interpreter's own part, below,
    writes a byte to a pipe at once.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._before = -1
        self._came = False

    def listen(self) -> None:
        """Begin; only the main thread can, elsewhere none ever comes."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def came(self) -> bool:
        """Whether one has, since `listen`."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                self._came = bool(os.read(self._pipe[0], 1)) or self._came
        return self._came

    def close(self) -> None:
        """End, and leave everything as it was."""
        if self._pipe is not None:
            signal.set_wakeup_fd(self._before)
            for end in self._pipe:
                os.close(end)
            self._pipe = None


def _reached(standing: Standing) -> tuple[int, int]:
    return standing.step, standing.count


def _places(standings: list[Standing]) -> str:
    """Each place once, with the ranks that stand there."""
    ranks: dict[str, list[int]] = {}
    for each in standings:
        ranks.setdefault(each.place, []).append(each.rank)
    return "; ".join(f"{_named(at)} at {place}" for place, at in ranks.items())


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    return f"ranks {shown}{' ...' if len(ranks) > SHOWN_RANKS else ''}"


def _key(rank: int) -> str:
    return f"standing/{rank}"


def _end_process(error: TrainingError) -> None:
    """End at once: the main thread may wait for ever in a collective. Checkpoints are whole or ignored."""
    with suppress(OSError):
        os.write(STDERR, f"{error}\n".encode())
    os._exit(error.exit_code)
