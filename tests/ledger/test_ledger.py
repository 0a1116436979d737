"""metrics.jsonl and TensorBoard: readable at any moment, every step once, nothing lost that was there."""

import json
import math
import subprocess
import sys
from io import FileIO

import pytest

from redline.errors import TrainingError
from redline.ledger import METRICS_FILE, ValidRecord, open_ledger, read_metrics

STEP_KEYS = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_time_s", "memory"}


def test_one_object_a_step_flushed_at_once(tmp_path, record):
    with open_ledger(tmp_path) as ledger:
        ledger.record(record(1, mfu=0.4))
        (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()  # before the file is closed
        assert json.loads(line).keys() >= STEP_KEYS and json.loads(line)["mfu"] == 0.4
        ledger.record_valid(ValidRecord(step=1, loss=2.0, tokens=100, time_s=0.1))
    step, valid = read_metrics(tmp_path / METRICS_FILE)
    assert (step["kind"], valid["kind"]) == ("step", "valid")
    assert valid["split"] == "valid" and valid["perplexity"] == pytest.approx(math.exp(2))
    assert ledger.last_valid is not None and ledger.last_valid.loss == 2.0


def test_numbers_that_are_not_finite_are_null(tmp_path, record):
    with open_ledger(tmp_path) as ledger:
        ledger.record(record(1, loss=math.nan, grad_norm=math.inf, nonfinite="the loss is nan", skipped=True))
        ledger.record_valid(ValidRecord(step=1, loss=math.nan, tokens=1, time_s=0.1))
    text = (tmp_path / METRICS_FILE).read_text()
    assert "NaN" not in text and "Infinity" not in text
    step, valid = read_metrics(tmp_path / METRICS_FILE)
    assert step["loss"] is None and step["grad_norm"] is None and step["nonfinite"] == "the loss is nan"
    assert valid["loss"] is None and valid["perplexity"] is None


def test_extra_values_become_keys(tmp_path, record):
    with open_ledger(tmp_path) as ledger:
        ledger.record(record(1, extra={"params_norm": 12.5, "num_zeros": None}))
    (step,) = read_metrics(tmp_path / METRICS_FILE)
    assert step["params_norm"] == 12.5 and step["num_zeros"] is None and "extra" not in step


def test_a_new_run_never_touches_an_old_file(tmp_path, record):
    with open_ledger(tmp_path) as ledger:
        ledger.record(record(1))
    before = (tmp_path / METRICS_FILE).read_bytes()
    with pytest.raises(TrainingError, match="File exists"):
        open_ledger(tmp_path)
    assert (tmp_path / METRICS_FILE).read_bytes() == before


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path, record):
    with open_ledger(tmp_path) as ledger:
        for step in (1, 2, 3, 4):
            ledger.record(record(step))
            ledger.record_valid(ValidRecord(step=step, loss=2.0, tokens=1, time_s=0.1))
    with open_ledger(tmp_path, resumed_step=2) as ledger:
        ledger.record(record(3, loss=9.0))
    found = [(entry["kind"], entry["step"]) for entry in read_metrics(tmp_path / METRICS_FILE)]
    assert found == [("step", 1), ("valid", 1), ("step", 2), ("valid", 2), ("step", 3)]
    assert read_metrics(tmp_path / METRICS_FILE)[-1]["loss"] == 9.0


def test_resuming_into_an_empty_folder(tmp_path, record):
    with open_ledger(tmp_path / "new", resumed_step=7) as ledger:
        ledger.record(record(8))
    assert [entry["step"] for entry in read_metrics(tmp_path / "new" / METRICS_FILE)] == [8]


def test_a_line_cut_by_a_crash_is_no_record_and_does_not_spoil_the_next(tmp_path, record):
    with open_ledger(tmp_path) as ledger:
        ledger.record(record(1))
    path = tmp_path / METRICS_FILE
    with open(path, "a") as handle:
        handle.write('{"kind": "step", "step": 2, "lo')
    assert [entry["step"] for entry in read_metrics(path)] == [1]
    with open_ledger(tmp_path, resumed_step=2) as ledger:
        ledger.record(record(3))
    assert [entry["step"] for entry in read_metrics(path)] == [1, 3]


@pytest.mark.parametrize(
    "damage", [b"nonsense", b"nonsense\n", b"\x80\xff\n\x01", b"[1]\n", b'{"cut\n{"step": 2}\n']
)
def test_what_no_run_wrote_is_an_error(tmp_path, record, damage):
    """A crash cuts a record short at the end of the file, and nowhere else."""
    with open_ledger(tmp_path) as ledger:
        ledger.record(record(1))
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + damage)
    with pytest.raises(ValueError, match="line 2 is no record"):
        read_metrics(path)
    for cut in b"", b'{"kind', b"\0" * 9:
        path.write_bytes(whole + cut)
        assert len(read_metrics(path)) == 1


def test_a_full_disk_is_one_error(record, tmp_path):
    with open_ledger(tmp_path) as ledger:
        ledger._metrics.close()
        ledger._metrics = FileIO("/dev/full", "w")
        with pytest.raises(TrainingError, match="/dev/full: No space left"):
            ledger.record(record(1))


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot write"):
        open_ledger(tmp_path / "file" / "run")


def test_tensorboard_holds_the_same_numbers(tmp_path, record):
    """Read back by TensorBoard's own reader; steps after a resume replace those before it."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = tmp_path / "tensorboard"
    with open_ledger(tmp_path, tensorboard_dir=events) as ledger:
        for step in (1, 2, 3):
            ledger.record(record(step, loss=float(step)))
        ledger.record_valid(ValidRecord(step=2, loss=0.5, tokens=1, time_s=0.1))
    with open_ledger(tmp_path, tensorboard_dir=events, resumed_step=2) as ledger:
        ledger.record(record(3, loss=30.0, grad_norm=math.nan))
    found = reader.EventAccumulator(str(events)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert [(event.step, event.value) for event in found.Scalars("valid/loss")] == [(2, 0.5)]
    assert [event.step for event in found.Scalars("train/grad_norm")] == [1, 2]  # NaN is no point


def test_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from redline.ledger import *; import redline.report;"
        "l = open_ledger(Path(sys.argv[1]), tensorboard_dir=Path(sys.argv[1]) / 'tb');"
        "l.record_valid(ValidRecord(step=1, loss=1.0, tokens=1, time_s=1.0)); l.close();"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
