"""Whole runs of a tiny model, in this process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from redline.cli.main import main

TINY = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --vocab-size 101 "
    "--seq-length 16 --mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --eval-iters 2 "
    "--lr 1e-2 --num-workers 0 --device cpu --threads 1 --no-profile-ledger"
)

# quick_start, for a Python process of its own.
QUICK_START = (
    "import redline.data.samples, redline.hardware.measure\n"
    "redline.data.samples.MOCK_DOCUMENTS = 500\n"
    "redline.hardware.measure.measure_gemm_peak = lambda *_: 1e12\n"
)

Refused = Callable[..., str]


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    folder: Path
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def records(self, kind: str = "step") -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records()]

    @property
    def valid_losses(self) -> list[float]:
        return [record["loss"] for record in self.records("valid") if record["split"] == "valid"]


@pytest.fixture(autouse=True, scope="module")
def quick_start() -> Iterator[None]:
    """What a start spends seconds on though no test looks at it; in time for the fixtures of a module.

    The index of 100,000 mock documents in samples of 16 tokens is 200 MB: 500 do. And the second in which
    the peak of this machine is measured: any number below which the tiny model stays does, FLOP/s.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.data.samples.MOCK_DOCUMENTS", 500)
        patch.setattr("redline.hardware.measure.measure_gemm_peak", lambda *_: 1e12)
        yield


@pytest.fixture
def redline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """redline("train --flag ...") -> (exit code, stdout, stderr), with caches in a folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(words: str) -> tuple[int, str, str]:
        code = main(words.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def train(redline: Any, tmp_path: Path) -> Any:
    """train("name", "--more flags") -> Run of the tiny model with these flags on top."""

    def call(name: str, flags: str = "", base: str = TINY) -> Run:
        code, out, err = redline(f"train {base} {flags} --save {tmp_path / name}")
        assert code == 0, err
        return Run(tmp_path / name, out)

    return call


def against_the_clock(test: Callable[..., None]) -> Callable[..., None]:
    """For a test that holds what is accounted against the clock: one of three attempts must agree.

    A busy machine takes the processor away between two looks at the clock: now and then, where a fault would
    show each time. Each attempt has its own folder, its own names of runs, and patches of its own.
    """

    @functools.wraps(test)
    def attempts(**fixtures: Any) -> None:
        for attempt in range(3):
            given = dict(fixtures)
            if "tmp_path" in given:
                given["tmp_path"] = fixtures["tmp_path"] / f"attempt{attempt}"
                given["tmp_path"].mkdir()
            if "train" in given:
                given["train"] = lambda name, flags, at=attempt: fixtures["train"](f"{name}{at}", flags)
            try:
                with pytest.MonkeyPatch.context() as patch:
                    return test(**given | ({"monkeypatch": patch} if "monkeypatch" in given else {}))
            except AssertionError:
                if attempt == 2:
                    raise

    return attempts


def content(folder: Path) -> dict[str, bytes | str]:
    """Every path below `folder` but the caches, with what it holds."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if "cache" not in path.relative_to(folder).parts:
            found[str(path)] = path.read_bytes() if path.is_file() else "folder"
    return found


@pytest.fixture
def refused(redline: Any, tmp_path: Path) -> Refused:
    """refused(words, code, *says) -> stderr, having checked that it is refused well and changes nothing."""

    def call(words: str, code: int, *says: str, changes: bool = False) -> str:
        before = content(tmp_path)
        found, _, err = redline(words)
        assert found == code, err
        for part in says:
            assert part in err, err
        for paragraph in err.strip().split("\n\n"):
            first, *rest = paragraph.splitlines()
            assert first.split(": ")[0].endswith("Error") and first.endswith(".")
            assert all(line.startswith(("  why:  ", "  mend: ", "  rule: ")) for line in rest), paragraph
            assert any(line.startswith("  mend: ") for line in rest), paragraph
        assert changes or content(tmp_path) == before
        return str(err)

    return call
