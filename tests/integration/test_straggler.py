"""`--log-straggler`: the rank that is slow is named, though all ranks take the same time for a step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.comm import Pace
from redline.config import Environment
from redline.data import Microbatch, Source
from redline.run import open_run, train_opened
from redline.step import train_step

from .conftest import against_the_clock
from .ranks import on_ranks
from .tiny import parsed

SLOWER_S = 0.1
SHARDED = {"use_distributed_optimizer": True, "ddp_bucket_size": 3000}
TP = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 2, "global_batch_size": 2}
VALUES = {"fp64": True, "micro_batch_size": 1, "train_iters": 8, "eval_iters": 0, "log_interval": 5}


def run_with_slow_rank(where: str, slow: int, folder: Path, values: dict[str, Any]) -> list[str]:
    """What a run of two prints whose rank `slow` is held up in its forward pass, or by its data."""

    def work(environment: Environment) -> list[str]:
        said: list[str] = []
        loss, read = train_step.microbatch_loss, Source.batch

        def slow_loss(*args: Any) -> torch.Tensor:
            time.sleep(SLOWER_S)
            return loss(*args)

        def slow_batch(source: Source, start: int, count: int) -> Microbatch:
            time.sleep(SLOWER_S)
            return read(source, start, count)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("redline.run.display.say", said.append)
            if environment.rank == slow and where == "forward":
                patch.setattr(train_step, "microbatch_loss", slow_loss)
            if environment.rank == slow and where == "data":
                patch.setattr(Source, "batch", slow_batch)
            options = parsed({**VALUES, **values, "log_straggler": True, "save": str(folder)})
            train_opened(open_run(options, environment, lambda _: None), 0.0)
        return said

    return on_ranks(2, work)[0]


@pytest.mark.parametrize(
    ("where", "slow", "values"),
    [
        ("forward", 1, SHARDED),
        ("data", 0, {"num_workers": 0}),
        ("forward", 0, TP),  # the ranks meet in every layer, and wait there
        ("forward", 1, TP | {"sequence_parallel": True}),
    ],
)
@against_the_clock
def test_the_slow_rank_is_named(where: str, slow: int, values: dict[str, Any], tmp_path: Path) -> None:
    """Of two microbatches a step: what holds the rank up, at least; the other's wait is not its own."""
    said = [line for line in run_with_slow_rank(where, slow, tmp_path, values) if "slowest" in line]
    assert len(said) == 2 and all(f"slowest rank {slow} " in line for line in said), said
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ranks = [record for record in records if record["kind"] == "ranks"]
    assert [record["step"] for record in ranks] == [5, 8]
    held_up = SLOWER_S * (2 if where == "forward" else 1)
    summary = json.loads((tmp_path / "summary.json").read_text())["ranks"]
    for record in (*ranks, summary):
        assert record["slowest_rank"] == slow and record["skew"] > 0.5
        own = record["own_time_s"]
        assert own[slow] >= held_up and own[slow] - own[1 - slow] > held_up / 2
    assert summary["step"] == 8


@against_the_clock
def test_a_wait_for_others_is_no_work() -> None:
    pace = Pace(torch.device("cpu"))
    assert pace.worked_s() == 0
    for _ in range(2):  # a step knows nothing of the one before
        pace.starts()
        time.sleep(0.02)
        with pace.waiting():
            time.sleep(0.3)
        pace.stops()
        with pace.waiting():
            time.sleep(0.01)
        assert 0.02 <= pace.worked_s() < 0.2
