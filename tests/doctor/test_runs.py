"""A run's folder in few numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from good_launch import case_of, script

from redline.doctor import diagnose, explained, read_run
from redline.doctor.runs import record_of
from redline.errors import DataError
from redline.hardware import hardware_named
from redline.ledger import Loss, Reference, StepAccount, write_account
from redline.ledger.causes import CAUSES
from redline.report.doctor_text import document


def step(number: int, seconds: float = 1.0, **more: object) -> dict[str, object]:
    return {
        "kind": "step",
        "step": number,
        "step_time_s": seconds,
        "tokens_per_s": 100 / seconds,
        "mfu": 0.4 / seconds,
        **more,
    }


def test_dips_and_skips() -> None:
    records = [step(number, 2.0 if number % 10 == 0 else 1.0, skipped=number == 5) for number in range(1, 61)]
    found = record_of(records, {})
    assert found.step_s == 1.0 and found.mfu == pytest.approx(0.4) and found.skipped_steps == 1
    assert found.slow_steps == (10, 20, 30, 40, 50, 60) and found.slow_period == 10
    assert found.lost_share == pytest.approx(6 / 63)


def test_warm_up_and_nulls_are_left_out() -> None:
    records = [step(1, 60.0), step(2, 5.0), step(3), *(step(number) for number in range(4, 10))]
    records.append({"kind": "step", "step": 10, "step_time_s": None})
    found = record_of(records, {"measured_memory_bytes": 5, "hardware": {"name": "NVIDIA H200"}})
    assert (
        found.step_s == 1.0
        and found.slow_steps == ()
        and found.memory_bytes == 5
        and found.gpu == "NVIDIA H200"
    )
    assert record_of([], {}).step_s is None


def test_profiled_steps_are_no_dips() -> None:
    """A trace slows the steps that it records: they tell nothing of the others."""
    records = [
        step(number, 2.0 if number in (5, 6) else 1.0, profiled=number in (5, 6)) for number in range(1, 13)
    ]
    found = record_of(records, {})
    assert (found.slow_steps, found.lost_share, found.steps) == ((), 0.0, 12)


def test_folder(tmp_path: Path) -> None:
    lines = [json.dumps(step(number)) for number in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
    found = read_run(tmp_path)
    assert found.steps == 7 and found.tokens_per_s == 100
    with pytest.raises(DataError, match="not a run's folder"):
        read_run(tmp_path / "nothing")


def loss(key: str, share: float) -> Loss:
    cause = CAUSES[key]
    return Loss(
        key=key, account=cause.account, cause=cause.words, ms=100 * share, share=share, points=100 * share,
        mends=cause.mends,
    )  # fmt: skip


SHARES = {"gemm": 0.20, "dp": 0.345, "attention": -0.01, "logging": 0.145, "unknown": 0.0}
ACCOUNT = StepAccount(
    reference=Reference(device="NVIDIA H100", kind="cuda"),
    steps=(4, 5),
    wall_ms=100.0,
    ideal_ms=31.0,
    mfu=0.31,
    losses=tuple(loss(key, share) for key, share in SHARES.items()),
    operators=(),
    modules=(),
)


def folder_of(path: Path) -> Path:
    """A run's folder with a ledger."""
    path.mkdir()
    (path / "metrics.jsonl").write_text("\n".join(json.dumps(step(number)) for number in range(1, 8)) + "\n")
    write_account(path / "ledger.json", ACCOUNT)
    return path


def test_ledger_explains_the_loss(tmp_path: Path) -> None:
    """The failed checks, each beside its cause, with the cause's share of everything that was lost."""
    run = read_run(folder_of(tmp_path / "run"))
    assert run.ledger_mfu == 0.31 and [loss.key for loss in run.losses] == ["dp", "gemm", "logging"]
    without = ("--overlap-grad-reduce", "--overlap-param-gather")
    case = case_of(tmp_path, script({"--log-interval": "1"}, without))
    case = replace(case, run=replace(run, mfu=0.31))
    found = diagnose(case)
    told = {loss.key: (share, checks) for loss, share, checks in explained(found)}
    assert told["dp"] == (pytest.approx(0.345 / 0.69), ["RL005"])
    assert told["logging"] == (pytest.approx(0.145 / 0.69), ["RL401"])
    assert told["gemm"][1] == [] and sum(share for share, _ in told.values()) == pytest.approx(1)
    low = next(each for each in found.findings if each.id == "RL704")
    assert "exposed data-parallel collectives 50%" in low.evidence
    losses = document(found)["verdict"]["losses"]
    assert losses[0]["cause"] == "dp" and losses[0]["checks"] == ["RL005"]
    assert losses[0]["share_of_loss"] == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"losses": [{}], "mfu": 1}', '{"losses": 3, "mfu": null}'])
def test_a_broken_ledger_is_refused_with_a_reason(text: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    (folder / "ledger.json").write_text(text)
    with pytest.raises(DataError, match=r"ledger\.json is no account") as refused:
        read_run(folder)
    assert refused.value.mend


def test_a_cpus_run_is_measured_and_never_predicted(tmp_path: Path) -> None:
    """A CPU has no data sheet: no prediction stands beside its figures, and the plain path is right there."""
    summary = {"hardware": {"name": "AMD EPYC", "kind": "cpu"}}
    run = record_of([step(number) for number in range(1, 9)], summary)
    assert run.on_cpu
    case = case_of(tmp_path, script({"--transformer-impl": "local"}), gpu=None)
    listed = {each.id: each for each in diagnose(replace(case, run=replace(run, mfu=0.05))).findings}
    assert not {"RL001", "RL002", "RL701"} & set(listed)
    assert "no ledger" in listed["RL704"].evidence and listed["RL704"].gain.step_time is None
    priced = replace(case, run=run, hardware=hardware_named("h100"))
    assert "RL701" not in {each.id for each in diagnose(priced).findings}
