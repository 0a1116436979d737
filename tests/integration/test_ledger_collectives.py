"""What exposed collectives cost, by the ledger and by the clock: two ranks over gloo with a slow link."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import Work

from redline.config import Environment
from redline.ledger import RankAccount, read_account
from redline.optim.reduce import Bucket, GradReducer
from redline.run import open_run, train_opened

from .conftest import against_the_clock
from .ranks import on_ranks
from .tiny import parsed


@dataclass(frozen=True)
class Watched:
    """The first rank's account; by its clock milliseconds of a step: of all waits, of those for gradients."""

    account: RankAccount
    waited_ms: float
    reducing_ms: float
    buckets: int

    @property
    def collectives_ms(self) -> float:
        return self.account.loss_ms("collective")


def late_by(delay_s: float) -> Any:
    """A GradReducer's `_send` over a link that takes `delay_s` for each bucket, one after the other."""
    line = ThreadPoolExecutor(1)

    def send(self: GradReducer, bucket: Bucket) -> None:
        def later() -> None:
            time.sleep(delay_s)
            self._shard.all_reduce(bucket.grads).wait()

        bucket.work = mock.Mock(wait=line.submit(later).result)

    return send


def watched(folder: Path, delay_s: float, busy_s: float = 0.0, **values: Any) -> Watched:
    """Two profiled steps; `busy_s`: of operators between the last gradient and the wait for their sums."""
    finish, wait, x = GradReducer.finish, Work.wait, torch.ones(192, 192)
    waits: list[float] = []
    reducing: list[float] = []
    buckets: list[int] = []

    def timed_wait(self: Work, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return wait(self, *args)
        finally:
            if torch.autograd._profiler_enabled():
                waits.append(time.perf_counter() - started)

    def busy_before(self: GradReducer) -> None:
        until = time.perf_counter() + busy_s
        while time.perf_counter() < until:
            x @ x
        before = sum(waits)
        finish(self)
        reducing.append(sum(waits) - before)
        buckets.append(len(self.buckets))

    def work(environment: Environment) -> tuple[float, float, int]:
        given = {"profile_ledger": True, "eval_iters": 0, "train_iters": 4, "save": str(folder)}
        options = parsed({**given, **values})
        with ExitStack() as changed:
            changed.enter_context(mock.patch.object(GradReducer, "finish", busy_before))
            changed.enter_context(mock.patch.object(Work, "wait", timed_wait))
            if environment.rank == 1:  # the first rank's collectives then last as long as the link takes
                changed.enter_context(mock.patch.object(GradReducer, "_send", late_by(delay_s)))
            train_opened(open_run(options, replace(environment, cache_dir=folder), lambda _: None), 0.0)
        return sum(waits), sum(reducing), buckets[0]

    (waited_s, reducing_s, count), _ = on_ranks(2, work)
    account = read_account(folder / "ledger.json")
    assert account.steps == (2, 3)
    return Watched(account.ranks[0], 1e3 * waited_s / 2, 1e3 * reducing_s / 2, count)


def most_idle(found: Watched) -> str:
    """The greatest cause of time without work."""
    idle = [loss for loss in found.account.losses if loss.account != "kernels"]
    return max(idle, key=lambda loss: loss.ms).key


@against_the_clock
def test_blocking_collectives_are_named_with_their_time(tmp_path: Path) -> None:
    hidden = watched(tmp_path / "hidden", 0.25, 0.35)
    blocking = watched(tmp_path / "blocking", 0.25, 0.35, overlap_grad_reduce=False)
    assert hidden.reducing_ms < 200 <= blocking.reducing_ms
    assert most_idle(blocking) == "collective"
    assert blocking.collectives_ms == pytest.approx(blocking.waited_ms, rel=0.1)


@against_the_clock
def test_tiny_buckets_are_named_with_their_time(tmp_path: Path) -> None:
    whole = watched(tmp_path / "whole", 0.03, overlap_grad_reduce=False)
    tiny = watched(tmp_path / "tiny", 0.03, overlap_grad_reduce=False, ddp_bucket_size=100)
    more_ms = 30 * (tiny.buckets - whole.buckets)
    assert more_ms >= 300 and tiny.reducing_ms >= 0.9 * more_ms
    assert most_idle(tiny) == "collective"
    assert tiny.collectives_ms == pytest.approx(tiny.waited_ms, rel=0.1)
