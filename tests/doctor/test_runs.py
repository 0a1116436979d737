"""A run's folder in few numbers."""

import json
from pathlib import Path

import pytest

from redline.doctor import read_run
from redline.doctor.runs import record_of
from redline.errors import DataError


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


def test_folder(tmp_path: Path) -> None:
    lines = [json.dumps(step(number)) for number in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
    found = read_run(tmp_path)
    assert found.steps == 7 and found.tokens_per_s == 100
    with pytest.raises(DataError, match="not a run's folder"):
        read_run(tmp_path / "nothing")
