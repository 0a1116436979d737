"""Whole runs on several processes, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import redline
from redline.checkpoint import save_checkpoint
from redline.cli.train import main as train_main
from redline.config import Environment
from redline.data import IndexedWriter
from redline.errors import CheckpointError, ConfigError
from redline.run import open_run, train_opened
from redline.run.resume import checkpoint_values

from .conftest import TINY
from .ranks import merged, on_ranks, state_of
from .tiny import opened, parsed, take_steps

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from processes import children_of

FP64 = {"fp64": True, "micro_batch_size": 1}
SOURCE = str(Path(redline.__file__).parents[1])  # what the launched processes import is what is tested


def launch(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """`redline train WORDS` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "redline", "train", *words.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": SOURCE, "XDG_CACHE_HOME": str(folder / "cache")},
    )


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A small token file: what is mocked here, launched processes do not see."""
    generator = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "data", np.dtype(np.int32)) as writer:
        for length in generator.integers(5, 40, 60):
            writer.add_document(generator.integers(0, 100, length))
    return str(tmp_path / "data")


def records(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def run_ranks(world_size: int, folder: Path, values: dict[str, Any]) -> list[Any]:
    """A whole run into `folder` on that many ranks; the summary of each (None but on the first)."""

    def work(environment: Environment) -> Any:
        run = open_run(parsed({**FP64, **values, "save": str(folder)}), environment, lambda _: None)
        return train_opened(run, 0.0)

    return on_ranks(world_size, work)


def test_nproc_per_node_trains_as_one_process(corpus: str, tmp_path: Path) -> None:
    """The command: two processes print one output, and the numbers are those of one process."""
    words = TINY.replace("--micro-batch-size 2", "--micro-batch-size 1 --fp64")
    words = words.replace("--mock-data", f"--data-path {corpus}")
    alone = launch(tmp_path, f"{words} --save one")
    assert alone.returncode == 0, alone.stderr
    done = launch(tmp_path, f"{words} --save two --nproc-per-node 2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder: two") == 1
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["outcome"] == "finished"
    for kind in ("step", "valid"):
        one, two = records(tmp_path / "one", kind), records(tmp_path / "two", kind)
        assert len(one) == len(two) > 0
        for before, after in zip(one, two, strict=True):
            assert after["loss"] == pytest.approx(before["loss"], rel=1e-12), kind
            for name in ("lr", "step", "consumed_samples", "tokens", "global_batch_size"):
                assert before.get(name) == after.get(name), name
    norms = [[step["grad_norm"] for step in records(tmp_path / name)] for name in ("one", "two")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-10)


@pytest.mark.long
def test_a_failure_names_the_rank_and_its_cause_once(tmp_path: Path) -> None:
    """A mistake that all ranks find is told by one; the launcher names the rank that failed first."""
    (tmp_path / "run").write_text("a file")
    done = launch(tmp_path, f"{TINY} --save run --nproc-per-node 2")
    assert done.returncode == 2  # as of one process: the command line cannot be obeyed
    assert done.stderr.count("--save run is a file") == 1
    assert "of 2 failed first" in done.stderr and "Traceback" not in done.stdout


@pytest.mark.long
def test_the_ranks_left_say_which_one_was_killed_and_where(tmp_path: Path) -> None:
    """A launcher ends them at once; they look who is gone before they go."""
    code, said = with_a_rank_killed(tmp_path, "--train-iters 5000")
    assert code == 1
    assert re.search(r"rank 1 at step \d+, .*, no longer answers", said), said
    assert "rank 1 of 2 failed first" in said and "by signal 9" in said


@pytest.mark.long
def test_the_launcher_starts_again_and_the_run_goes_on_by_itself(tmp_path: Path) -> None:
    """From its newest checkpoint, in the same folder, to the end."""
    code, said = with_a_rank_killed(tmp_path, "--train-iters 120 --save-interval 4 --max-restarts 1")
    assert code == 0, said
    assert [step["step"] for step in records(tmp_path / "run")] == list(range(1, 121))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "finished"
    assert re.search(r"rank 1 at step \d+, .*, no longer answers", said), said


def with_a_rank_killed(folder: Path, words: str) -> tuple[int, str]:
    """Exit code and stderr of a run in `folder`/run whose second rank is killed after some steps."""
    command = f"{TINY} {words} --save run --nproc-per-node 2".split()
    job = started(folder, command)
    os.kill(max(children_of(job.pid)), signal.SIGKILL)
    _, said = job.communicate(timeout=100)
    return job.returncode, said


def started(folder: Path, command: list[str]) -> subprocess.Popen[str]:
    """`redline train COMMAND` in a process of its own, some steps into its run in `folder`/run."""
    job = subprocess.Popen(
        [sys.executable, "-m", "redline", "train", *command],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": SOURCE,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder),
        },
    )
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 3000):
        time.sleep(0.2)
    return job


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_the_run_well(tmp_path: Path, number: int) -> None:
    """The ranks finish their step, save and end; the launcher complains of nothing and leaves nothing."""
    words = f"{TINY} --train-iters 100000 --eval-iters 100000 --save run --nproc-per-node 2"
    job = started(tmp_path, words.split())
    job.send_signal(number)
    _, said = job.communicate(timeout=100)
    assert job.returncode == 0, said
    steps = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert (tmp_path / "run" / "checkpoints" / f"iter_{steps:07d}" / "values.json").exists()
    assert "Traceback" not in said and records(tmp_path / "run", "valid") == []
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("redline-", "torchelastic"))]


SHARDED = {"use_distributed_optimizer": True, "ddp_bucket_size": 3000}
LAYOUTS = [(2, {}, 1, {}), (2, SHARDED, 2, SHARDED), (2, SHARDED, 1, {}), (1, {}, 4, SHARDED)]


@pytest.mark.parametrize(("ranks", "values", "other_ranks", "other_values"), LAYOUTS)
def test_b103_b106_resumes_in_another_layout(
    ranks: int, values: dict[str, Any], other_ranks: int, other_values: dict[str, Any], tmp_path: Path
) -> None:
    """Saved after step 3 by some ranks, gone on by others, shards or none: the losses of the straight run."""
    run_ranks(ranks, tmp_path / "straight", values)
    run_ranks(ranks, tmp_path / "run", {**values, "exit_interval": 3})
    summaries = run_ranks(other_ranks, tmp_path / "run", {**other_values, "load": str(tmp_path / "run")})
    assert [summary is None for summary in summaries] == [rank > 0 for rank in range(other_ranks)]
    straight, resumed = records(tmp_path / "straight"), records(tmp_path / "run")
    assert [step["step"] for step in resumed] == list(range(1, 7))
    losses = [[step["loss"] for step in steps] for steps in (straight, resumed)]
    if (ranks, values) == (other_ranks, other_values):
        assert losses[0] == losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_a_checkpoint_of_shards_holds_the_bits_of_every_layout(tmp_path: Path) -> None:
    """Saved as shards, read whole; saved whole, read as shards, by tensor-parallel ranks too: the same."""

    def held(world_size: int, values: dict[str, Any], save: Path, load: Path | None = None) -> Any:
        def work(environment: Environment) -> Any:
            more = {} if load is None else {"load": str(load)}
            run = open_run(parsed({**FP64, **values, **more}), environment, lambda _: None)
            if load is None:
                take_steps(run, 2)
            found, group = state_of(run), run.groups.control.handle
            values_ = checkpoint_values(run.config, run.plan, run.schedules, run.state, {})
            save_checkpoint(save, 2, run.state.tensors(), values_, group=group)
            return found

        return merged(on_ranks(world_size, work))

    first = held(2, SHARDED, tmp_path / "a")
    tp = {"tensor_model_parallel_size": 2}
    layouts = [(1, {}), (4, SHARDED), (4, SHARDED | tp), (2, tp), (2, {}), (4, tp), (2, SHARDED)]
    for number, (world_size, values) in enumerate(layouts):
        saved = tmp_path / ("a" if number == 0 else f"b{number - 1}")
        found = held(world_size, values, tmp_path / f"b{number}", load=saved)
        assert found.keys() == first.keys()
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_a_mistake_in_the_batch_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be split by --micro-batch-size 4 over 2 data-parallel"):
        run_ranks(2, tmp_path / "run", {"micro_batch_size": 4})
    assert not (tmp_path / "run").exists()


PUSHED = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "tp_comm_overlap": True,
    "tp_comm_overlap_method": "pushed",
}


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"micro_batch_size": 4}, "cannot be split"),
        (PUSHED, "pushed cannot run here"),
    ],
)
def test_what_every_rank_finds_wrong_is_told_by_one(values: dict[str, Any], what: str) -> None:
    def work(environment: Environment) -> bool:
        with pytest.raises(ConfigError, match=what) as caught:
            open_run(parsed({**FP64, **values}), environment, lambda _: None)
        return caught.value.everywhere

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"load": "nowhere"}, "--load nowhere is not a folder"),
        ({"load": "@run", "hidden_size": 64}, "checkpoint of another model"),
        ({"load": "@bare"}, "holds no optimizer states"),
        ({"load": "@damaged"}, "is damaged"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_told_once(
    values: dict[str, Any], what: str, train: Any, tmp_path: Path
) -> None:
    name = values["load"].removeprefix("@")
    if name != "nowhere":
        train(name, "--train-iters 1 --fp64" + (" --no-save-optim" if name == "bare" else ""))
        values = {**values, "load": str(tmp_path / name)}
    if name == "damaged":
        (shard,) = (tmp_path / name).rglob("*.safetensors")
        content = bytearray(shard.read_bytes())
        content[-2] ^= 1
        shard.write_bytes(content)

    def work(environment: Environment) -> bool:
        with pytest.raises(CheckpointError, match=what) as caught:
            open_run(parsed({**FP64, **values}), environment, lambda _: None)
        return caught.value.everywhere

    assert on_ranks(2, work) == [True, True]


def test_another_number_of_processes_than_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--nproc-per-node 3 does not fit the 2 processes"):
        train_main([*TINY.split(), "--nproc-per-node", "3"])


def test_options_of_what_one_process_does_not_send_are_said_to_be_idle(tmp_path: Path) -> None:
    said: list[str] = []
    opened(tmp_path, {**FP64, "ddp_bucket_size": 3000, "overlap_grad_reduce": True}, said.append)
    (idle,) = [line for line in said if "nothing to do" in line]
    assert idle.startswith("--overlap-grad-reduce, --ddp-bucket-size: one data-parallel process")
    said.clear()
    opened(tmp_path, {**FP64, "overlap_grad_reduce": False}, said.append)
    assert not any("nothing to do" in line for line in said)


def test_ranks_without_a_place_to_meet_are_refused() -> None:
    environment = replace(Environment(), rank=1, world_size=2)
    (problem,) = environment.problems()
    assert "MASTER_ADDR" in problem.what
