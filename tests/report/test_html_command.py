"""`redline report`: where it writes, and what it refuses and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_run import make_run

from redline.cli.main import main
from redline.errors import ConfigError
from redline.ledger import METRICS_FILE


def test_writes_into_the_run_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "mine")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    assert main(["report", str(folder), "-o", str(tmp_path / "other.html"), "--price-per-gpu-hour", "2"]) == 0
    assert "Cost of a billion" in (tmp_path / "other.html").read_text()
    other = make_run(tmp_path / "other")
    assert main(["report", str(folder), str(other)]) == 0
    assert "mine against other" in (folder / "compare.html").read_text()
    assert "mine against" not in (folder / "report.html").read_text()
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []


def test_needs_no_torch(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    barred = "import sys; sys.modules.update(torch=None, numpy=None, tensorboard=None)"
    script = f"{barred}; from redline.cli.main import main; sys.exit(main(['report', {str(folder)!r}]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and (folder / "report.html").exists()


def test_opens_a_browser_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    folder = make_run(tmp_path / "mine")
    assert main(["report", str(folder), "--open"]) == 0
    assert opened == [(folder / "report.html").as_uri()]


def test_the_doctor_examines_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    main(["report", str(folder)])
    page = (folder / "report.html").read_text()
    assert 'class="finding' in page and "fp8 is not used" in page


def test_a_run_that_the_doctor_refuses_lacks_only_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise ConfigError("num_layers is of another release.", "it says <b>.")

    monkeypatch.setattr("redline.cli.doctor.case_of_run", refuse)
    folder = make_run(tmp_path / "mine")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "The doctor cannot examine this run: num_layers is of another release. it says &lt;b&gt;." in page


def odd_memory(folder: Path) -> None:
    (folder / "summary.json").unlink()
    with open(folder / METRICS_FILE, "a") as handle:
        handle.write('{"kind": "step", "step": 99, "memory": "much"}\n')


@pytest.mark.parametrize(
    ("break_it", "said", "code"),
    [
        (lambda f: (f / METRICS_FILE).unlink(), "holds no metrics.jsonl", 2),
        (lambda f: (f / METRICS_FILE).write_text("{}\n"), "holds no step", 1),
        (lambda f: (f / METRICS_FILE).write_bytes(b"\xff\xfe\n"), "its line 1 is no record", 1),
        (lambda f: (f / "summary.json").write_text("{"), "summary.json cannot be read", 1),
        (lambda f: (f / "summary.json").write_text("[]"), "holds a list, not an object", 1),
        (lambda f: (f / "summary.json").write_bytes(b"\xff"), "summary.json cannot be read", 1),
        (
            lambda f: (f / "summary.json").write_text('{"choices": [1]}'),
            "one of its choices does not name",
            1,
        ),
        (lambda f: (f / "summary.json").write_text('{"mfu": 0.5}'), "its mfu is no object", 1),
        (lambda f: odd_memory(f), "metrics.jsonl cannot be read: its values are not a run's", 1),
        (lambda f: (f / "fp8.jsonl").write_text("no records\n"), "fp8.jsonl cannot be read: its line 1", 1),
        (lambda f: (f / "fp8.jsonl").write_bytes(bytes(range(1, 9))), "fp8.jsonl cannot be read", 1),
        (
            lambda f: (f / "metrics.jsonl").write_text("{}\nx\n"),
            "metrics.jsonl cannot be read: its line 2",
            1,
        ),
        (lambda f: (f / "config.toml").write_text("[model"), "config.toml cannot be read", 1),
        (lambda f: (f / "ledger.json").write_text("{}"), "ledger.json is no account", 1),
        (lambda f: (f / "ledger.json").write_text('{"version": 99}'), "its version is 99", 1),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: object, said: str, code: int
) -> None:
    folder = make_run(tmp_path / "mine")
    assert callable(break_it)
    break_it(folder)
    assert main(["report", str(folder)]) == code
    error = capsys.readouterr().err
    assert said in error and "mend:" in error and "Traceback" not in error
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "the following arguments are required"),
        ("no-such-run", "there is no no-such-run"),
        ("mine/metrics.jsonl", "is a file"),
        ("mine mine", "named twice"),
        ("mine -o no-such/report.html", "there is no folder no-such"),
        ("mine -o mine", "is a folder"),
        ("mine --price-per-gpu-hour 0", "no price above 0"),
        ("mine --price-per-gpu-hour nan", "no price above 0"),
        ("mine --prise-per-gpu-hour 2", "did you mean --price-per-gpu-hour?"),
        (".", "is not a run's folder"),
    ],
)
def test_a_mistake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "mine")
    assert main(["report", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_odd_values_do_not_stop_it(tmp_path: Path) -> None:
    """A summary that another program has emptied or translated."""
    odd = {"mfu": {"full": None}, "hardware": None, "predicted_memory": {"total": "much"}, "choices": None,
           "tokens_per_s": "fast", "name": "\ud800", "files": {"a": 1}, "outcome": "\udc80"}  # fmt: skip
    folder = make_run(tmp_path / "mine")
    document = json.loads((folder / "summary.json").read_text()) | odd
    (folder / "summary.json").write_text(json.dumps(document))
    assert main(["report", str(folder)]) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "mine")
    folder.chmod(0o500)
    assert main(["report", str(folder)]) == 1
    assert "cannot write" in capsys.readouterr().err
