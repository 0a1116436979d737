"""Runs whose steps are profiled: the same numbers, a true account, and nothing paid in other steps."""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.cli.main import main
from redline.config import Environment
from redline.data import Source
from redline.ledger import RunStatistics, StepAccount, StepRecord, read_account
from redline.run import open_run, train_opened
from redline.run.profiling import ledger_windows
from redline.run.throughput import ThroughputWatch

from .conftest import TINY, against_the_clock
from .ranks import on_ranks
from .tiny import parsed

LEDGER = "--profile-ledger --log-throughput"


def account_of(run: Any) -> StepAccount:
    found = read_account(run.folder / "ledger.json")
    total = (found.ideal_ms or 0.0) + sum(loss.ms for loss in found.losses)
    assert total == pytest.approx(found.wall_ms, rel=1e-9)
    return found


def test_profiling_changes_no_bit_and_leaves_an_account(train: Any) -> None:
    plain = train("plain")
    watched = train("watched", "--profile-ledger")
    assert watched.losses == plain.losses and watched.valid_losses == plain.valid_losses
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in watched.records()] == [r[name] for r in plain.records()]
    weights = "checkpoints/iter_0000006"
    for path in sorted((plain.folder / weights).rglob("*.safetensors")):
        assert (watched.folder / path.relative_to(plain.folder)).read_bytes() == path.read_bytes()

    found = account_of(watched)
    assert found.steps == (4, 5) and [r["profiled"] for r in watched.records()] == 3 * [False] + 2 * [
        True
    ] + [False]
    assert found.reference.flops_source == "model" and found.mfu is not None
    assert not (plain.folder / "ledger.json").exists()
    assert watched.summary["ledger"]["steps"] == [4, 5]
    assert "where the time of steps 4-5 went" in watched.output
    json.loads(gzip.decompress((watched.folder / "trace-rank0-step4-5.json.gz").read_bytes()))


def test_little_stays_unknown(train: Any) -> None:
    """A busy machine may take the processor away between two regions, not in each of three runs."""
    wide = "--profile-ledger --hidden-size 256 --ffn-hidden-size 512 --train-iters 4 --eval-iters 0"
    shares = []
    while len(shares) < 3 and min(shares, default=1.0) > 0.02:
        found = account_of(train(f"run{len(shares)}", wide))
        shares.append(found.loss_ms("unknown") / found.wall_ms)
    assert min(shares) <= 0.02, shares


def test_every_product_of_the_model_is_found_with_its_flops_layer_module_and_role(train: Any) -> None:
    run = train("run", "--profile-ledger")
    found = account_of(run)
    products = [each for each in found.operators if each.kind == "gemm" and each.role]
    # Forward, the gradient of the input and of the weight: the same FLOPs each, the model's in all. The first
    # layer's input is an embedding, so that no product lacks its dgrad.
    by_role = {role: sum(each.flops or 0 for each in products if each.role == role) for role in
               ("fprop", "dgrad", "wgrad")}  # fmt: skip
    reference = found.reference
    dense = reference.model_flops - reference.attention_flops
    padded = dense / 3 + 2 * 64 * 32 * (128 - 101)  # the head's product has padded columns, 64 tokens a step
    assert by_role == pytest.approx({"fprop": padded, "dgrad": padded, "wgrad": padded})
    places = {(each.layer, each.module) for each in found.modules if each.flops and each.phase == "backward"}
    sites = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
    assert {(layer, site) for layer in (0, 1) for site in sites} | {(None, "head")} <= places


@pytest.mark.parametrize(("iters", "steps"), [(1, (1,)), (2, (1,)), (3, (1, 2)), (4, (2, 3))])
def test_short_runs_have_an_account_too(train: Any, iters: int, steps: tuple[int, ...]) -> None:
    run = train("run", f"--train-iters {iters} --profile-ledger --eval-iters 0")
    assert account_of(run).steps == steps


def test_which_steps_are_profiled() -> None:
    assert list(ledger_windows(0, 100, None)) == [(5, 6)]
    assert list(ledger_windows(40, 100, None)) == [(45, 46)]
    assert list(ledger_windows(0, 30, 10)) == [(5, 6), (15, 16), (25, 26)]
    assert list(ledger_windows(0, 10, 1)) == [(5, 6), (8, 9)]  # with room to warm the tracer up
    assert list(ledger_windows(0, 100, None, 1)) == [(5, 5)]
    assert list(ledger_windows(7, 7, None)) == []


def test_other_steps_make_not_one_call_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of functions in a step with the ledger off, and in one before and after the profiled steps."""
    counts: dict[bool, list[int]] = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    from redline.step import TrainStep

    step = TrainStep.__call__

    def counted(self: Any, microbatches: Any) -> Any:
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            return step(self, microbatches)
        finally:
            sys.setprofile(None)
            counts[profiles].append(calls)

    monkeypatch.setattr(TrainStep, "__call__", counted)
    for profiles in (False, True):
        counts[profiles] = []
        words = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 50 --seq-length 8 "
        words += "--mock-data --micro-batch-size 1 --global-batch-size 2 --train-iters 7 --eval-iters 0 "
        words += f"--num-workers 0 --device cpu --save {profiles} --no-async-save "
        assert main(["train", *words.split(), "--profile-ledger" if profiles else "--no-profile-ledger"]) == 0
    off, on = counts[False], counts[True]
    settled = off[3]
    assert off[3:] == [settled] * 4
    assert on[3] == settled and on[6] == settled  # steps 4 and 7, beside the profiled 5 and 6
    assert on[4] > settled and on[5] > settled


@against_the_clock
def test_a_sleeping_data_loader_is_named_with_its_time(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, spent = Source.batch, []

    def slow(self: Any, *place: int) -> Any:
        started = time.perf_counter()
        time.sleep(0.05)
        found = read(self, *place)
        spent.append(time.perf_counter() - started)
        return found

    quick = account_of(train("quick", "--profile-ledger"))
    monkeypatch.setattr(Source, "batch", slow)
    found = account_of(train("slow", "--profile-ledger"))
    slept_ms = 1e3 * sum(spent[6:10]) / 2  # steps 4 and 5, two microbatches each
    assert 100 <= slept_ms == pytest.approx(found.loss_ms("data") - quick.loss_ms("data"), rel=0.1)
    assert max(found.losses, key=lambda loss: loss.ms).key == "data"


def test_recomputed_work_is_named_and_changes_nothing_else(train: Any) -> None:
    plain = account_of(train("plain", "--profile-ledger"))
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    found = account_of(train("full", f"--profile-ledger {full}"))
    assert plain.loss_ms("recompute") == 0
    again = [each for each in found.operators if each.phase == "recompute"]
    assert sum(each.ms for each in again) == pytest.approx(found.loss_ms("recompute"), rel=1e-6)
    # All products of the layers, none of the head: two microbatches of 32 tokens, hidden 32, ffn 48.
    layers = 2 * 64 * (32 * 3 * 32 + 32 * 32 + 2 * 32 * 48) * 2
    assert sum(each.flops or 0 for each in again if each.kind == "gemm" and each.role) == layers
    assert found.reference.model_flops == plain.reference.model_flops


@against_the_clock
def test_an_operator_that_is_not_fused_shows_as_the_activation(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.functional as F

    gelu, spent = F.gelu, []
    x_held, y_held = torch.ones(1 << 23), torch.ones(1 << 23)

    def slow(x: torch.Tensor, **form: Any) -> torch.Tensor:
        """Beside its own work long operators, in memory that is there: what the clock sees is all theirs."""
        started = time.perf_counter()
        for _ in range(3):
            torch._C._nn.gelu(x_held, out=y_held)
        spent.append(time.perf_counter() - started)
        return gelu(x, **form)

    big = "--activation-func gelu --train-iters 4 --eval-iters 0"
    plain = account_of(train("plain", f"--profile-ledger {big}"))
    monkeypatch.setattr("redline.kernels.activation_reference.CURVES", {"exact": slow})
    found = account_of(train("slow", f"--profile-ledger {big}"))
    extra = found.loss_ms("activation") - plain.loss_ms("activation")
    wanted = 1e3 * sum(spent[4:12]) / 2  # steps 2 and 3 of 4: two microbatches, two layers
    grown = {each.key: each.ms - plain.loss_ms(each.key) for each in found.losses}
    assert max(grown, key=lambda key: grown[key]) == "activation"
    assert extra == pytest.approx(wanted, rel=0.1)


@against_the_clock
def test_a_fall_of_throughput_is_reported_with_its_cause(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Source.batch

    def slow_from_sample_32(self: Any, start: int, size: int) -> Any:
        time.sleep(0.2 if start >= 32 else 0.0)
        return read(self, start, size)

    monkeypatch.setattr(Source, "batch", slow_from_sample_32)
    run = train("run", f"{LEDGER} --train-iters 14 --log-interval 2 --eval-iters 0 --throughput-drop 0.5")
    (warning,) = re.findall(r"step (\d+): .* tokens/s, (\d+)% below this run's median", run.output)
    assert int(warning[0]) == 10
    (cause,) = re.findall(r"step 11: .*of which (.*) (\d+) ms \(before.*account (\w+)", run.output)
    assert cause[0] == "waiting for data" and 360 < int(cause[1]) < 800 and cause[2] == "host"


def a_step(step: int, rate: float) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, lr=1.0, grad_norm=1.0, tokens_per_s=rate, step_time_s=1 / rate, memory=1,
        consumed_samples=step, global_batch_size=1,
    )  # fmt: skip


def test_low_is_said_once_until_it_recovers() -> None:
    watch, statistics, said = ThroughputWatch(0.2), RunStatistics(warmup_steps=0), []
    for step, rate in enumerate([100, 100, 100, 70, 60, 100, 50], start=1):
        for _ in range(2):
            taken = a_step(step, rate)
            statistics.add(taken)
            watch.add(taken)
        said.append(watch.look(step, statistics) is not None)
    assert said == [False, False, False, True, False, False, True]


def test_profile_writes_the_steps_that_were_asked_for(train: Any) -> None:
    run = train("run", "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3")
    assert [path.name for path in run.folder.glob("trace*")] == ["trace-rank0-step2-3.json.gz"]
    assert account_of(run).steps == (2, 3)


def test_the_steps_asked_for_go_before_those_of_the_account(train: Any) -> None:
    """They meet at step 5: the account is of the steps asked for, which is all that this rank profiles."""
    words = "--profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 6 --profile-ledger"
    run = train("run", words)
    assert [path.name for path in run.folder.glob("trace*")] == ["trace-rank0-step5-6.json.gz"]
    assert account_of(run).steps == (5, 6) and "takes no account" not in run.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--profile-step-start 5 --profile-step-end 3", "leave no step to profile"),
        ("--profile-step-start 6 --profile-step-end 7", "the run ends with step 6"),
        ("--train-iters none --train-samples 24", "--profile-step-start 10 lies behind the last step, 6."),
        ("--profile-step-start 2 --profile-ranks 7", "--profile-ranks 7: there is no rank 7"),
    ],
)
def test_a_profile_of_nothing_is_refused_at_the_start(redline: Any, words: str, says: str) -> None:
    code, _, err = redline(f"train {TINY} --profile --use-pytorch-profiler {words} --save run")
    assert code == 2 and says in err and "mend:" in err


def test_a_profile_that_does_not_come_is_said(train: Any) -> None:
    """Where only the run itself can know: it stops before its window, or goes on behind it."""
    words = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5"
    early = train("run", f"{words} --exit-interval 2")
    assert early.output.count("--profile of steps 4 to 5: the run stopped at step 2") == 1
    train("run", "--exit-interval 5 --load run")
    late = train("run", f"{words} --load run")
    assert late.output.count("--profile of steps 4 to 5: the run goes on at step 6") == 1
    assert not list(late.folder.glob("trace*"))


def test_an_account_that_gives_way_to_another_ranks_profile_is_missed_aloud(tmp_path: Path) -> None:
    values = {
        "profile": True,
        "use_pytorch_profiler": True,
        "profile_step_start": 3,
        "profile_step_end": 5,
        "profile_ranks": (1,),
        "profile_ledger": True,
        "micro_batch_size": 1,
        "save": str(tmp_path / "run"),
    }

    def work(environment: Environment) -> int:
        said: list[str] = []
        train_opened(open_run(parsed(values), environment, said.append), 0.0)
        return sum("--profile-ledger" in line and "takes no account" in line for line in said)

    assert on_ranks(2, work) == [1, 0]
    names = sorted(path.name for path in (tmp_path / "run").glob("*.json*"))
    assert "trace-rank1-step4-5.json.gz" in names and "ledger.json" not in names


def test_a_failing_step_ends_the_capture_and_keeps_nothing(train: Any, redline: Any, tmp_path: Path) -> None:
    broken = "--profile-ledger --init-method-std 1e30 --check-for-nan-in-loss-and-grad"
    code, _, err = redline(f"train {TINY} {broken} --train-iters 2 --save {tmp_path / 'broken'}")
    assert code == 1 and "TrainingError" in err
    assert not list((tmp_path / "broken").glob("*.gz"))
    assert account_of(train("after", "--profile-ledger")).steps == (4, 5)  # the profiler is free again


def test_the_command_reads_a_run_and_its_trace_alike(train: Any, redline: Any) -> None:
    run = train("run", "--profile-ledger")
    code, text, _ = redline(f"ledger {run.folder}")
    assert code == 0 and "launch gaps" in text and "aten::mm" in text
    assert redline(f"ledger {run.folder / 'ledger.json'}") == (0, text, "")
    trace = run.folder / "trace-rank0-step4-5.json.gz"
    code, _, err = redline(f"ledger {trace} --gpu h200 --dtype int3")
    assert code == 2 and "--dtype int3" in err
    for source in trace, run.folder:  # a CPU has no data sheet, and the run's own ledger another peak
        code, _, err = redline(f"ledger {source} --dtype fp32")
        assert code == 2 and "--dtype fp32: there is no data sheet of the trace's device" in err
    code, text, _ = redline(f"ledger {run.folder} --gpu h200 --dtype fp8 --json")
    reference = json.loads(text)["reference"]
    assert (reference["dtype"], reference["peak_flops_per_s"]) == ("fp8", pytest.approx(1978.9e12, rel=1e-3))
    code, text, _ = redline(f"ledger {trace} --peak 1e11 --dtype fp32 --json")
    assert code == 0 and json.loads(text)["reference"]["dtype"] == "fp32"
    code, text, _ = redline(f"ledger {trace} {trace} --json")  # both say rank 0: taken as ranks 0 and 1
    assert code == 0 and [rank["rank"] for rank in json.loads(text)["ranks"]] == [0, 1]
    code, text, _ = redline(f"ledger {run.folder / 'trace-rank0-step4-5.json.gz'} --peak 1e11 --json")
    again, found = json.loads(text), account_of(run)
    assert code == 0 and again["wall_ms"] == found.wall_ms
    assert {loss["key"] for loss in again["losses"]} == {loss.key for loss in found.losses}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("ledger", 2, "no trace is named"),
        ("ledger none.json", 1, "cannot read none.json"),
        ("ledger .", 1, "holds no trace"),
        ("ledger . .", 2, "is a folder among 2 paths"),
        ("ledger x.json --peak -3", 2, "--peak"),
        ("ledger x.json --gpu abacus", 1, "cannot read"),
        ("ledger x.json --operatorz 3", 1, "cannot read"),
    ],
)
def test_mistakes_are_said_plainly(refused: Any, words: str, code: int, says: str) -> None:
    refused(words, code, says)


@against_the_clock
def test_two_ranks_are_accounted_together_and_the_slow_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Source.batch

    def slow_on_the_second(self: Any, start: int, size: int) -> Any:
        time.sleep(0.1 if start % 4 >= 2 else 0.0)  # rank 1 has the second half of every run of samples
        return read(self, start, size)

    monkeypatch.setattr(Source, "batch", slow_on_the_second)
    values = {"profile_ledger": True, "eval_iters": 0, "train_iters": 4, "save": str(tmp_path / "run")}

    def work(environment: Environment) -> Any:
        run = open_run(parsed(values), replace(environment, cache_dir=tmp_path), lambda _: None)
        return train_opened(run, 0.0)

    on_ranks(2, work)
    found = read_account(tmp_path / "run" / "ledger.json")
    assert [rank.rank for rank in found.ranks] == [0, 1] and found.steps == (2, 3)
    assert len(list((tmp_path / "run").glob("trace-rank?-step2-3.json.gz"))) == 2
    spread = {each.key: each for each in found.spread}
    assert spread["data"].worst_rank == 1 and 100 <= spread["data"].worst_ms < 200
    # The other rank waits for it in the first collective of the step.
    assert found.ranks[0].loss_ms("data") < 50
    assert spread["collective"].worst_rank == 0 and spread["collective"].worst_ms >= 80
    assert spread["wall"].skew < 0.1
    assert found.mfu is not None and all(rank.mfu is not None for rank in found.ranks)
