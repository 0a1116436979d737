"""`redline` itself: help that can be followed, exit codes, and streams that are gone."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from redline.cli import bench, data, main, memory
from redline.cli.bench import USAGE as BENCH
from redline.cli.memory import USAGE as MEMORY
from redline.config import format_help, parse_args
from redline.errors import DataError, UsageError

HELPS = {
    "": main.usage(),
    "train": format_help(width=100),
    "train, all": format_help(short=False, width=100),
    "data": data.USAGE,
    "data prepare": data.VERBS["prepare"][0]().format_help(),
    "data inspect": data.VERBS["inspect"][0]().format_help(),
    "bench": BENCH,
    "memory": MEMORY,
}


@pytest.mark.parametrize("name", HELPS)
def test_help_is_readable(name: str) -> None:
    """It fits 110 columns, says how to call the command, and ends with two or three examples."""
    text = HELPS[name]
    assert max(map(len, text.splitlines())) <= 110
    assert "usage: redline" in text and "\t" not in text
    _, _, examples = text.partition("examples:\n")
    assert 2 <= examples.count("\n  redline") + 1 <= 4
    assert all(line.startswith(("  redline ", "      ")) for line in examples.splitlines())


def examples() -> list[str]:
    """Every example of every help, on one line."""
    found = []
    for text in HELPS.values():
        lines = text.partition("examples:\n")[2].replace("\\\n", " ").splitlines()
        found += [re.sub(" +", " ", line.strip()) for line in lines]
    return sorted(set(found))


@pytest.mark.parametrize("line", examples())
def test_examples_are_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names flags that exist and go together; a file that it reads is taken for an empty one."""
    program, command, *words = shlex.split(line)
    assert program == "redline" and command in main.COMMANDS
    words = [word for word in words if not word.endswith(".toml")]
    if command == "train":
        parse_args(words)
    elif command == "memory":
        memory.main([*words, "--gpu", "h100"] if "--gpu" not in words else words)
    elif command == "data":
        data.VERBS[words[0]][0]().parse(words[1:])
    else:
        assert words[0] in bench.CASES


def test_train_help_lists_what_it_does_instead_of_training() -> None:
    for name in ("train", "train, all"):
        assert all(f"  {flag} " in HELPS[name] for flag in ("--print-config", "--help", "--help-all"))


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_top_level_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in main.COMMANDS) and "examples:" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("help data", "usage: redline data prepare INPUT"),
        ("data", "usage: redline data prepare INPUT"),
        ("data help", "usage: redline data prepare INPUT"),
        ("data prepare --help", "--train-tokenizer SIZE"),
        ("data inspect x -h", "--documents N"),
        ("bench", "usage: redline bench step"),
        ("bench step --help", "usage: redline bench step"),
        ("help memory", "--gpu NAME"),
        ("train -h", "--print-config"),
    ],
)
def test_help_of_commands(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words.split()) == 0
    found = capsys.readouterr()
    assert says in found.out and found.err == ""


def test_print_config_is_read_back_as_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--preset qwen3-0.6b --mock-data --train-iters 7 --no-async-save --lr 1e-3"
    assert main.main(["train", *words.split(), "--print-config"]) == 0
    first = capsys.readouterr().out
    Path("c.toml").write_text(first)
    assert main.main(["train", "--print-config", "c.toml", "--lr", "1e-2", "--lr", "1e-3"]) == 0
    again = capsys.readouterr()
    assert again.out == first and "--lr is given twice: --lr 0.01, then --lr 0.001." in again.err


def failing_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(argv: object) -> int:
        raise error

    monkeypatch.setattr(main, "run_command", run)
    return main.main([])


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            DataError("a.bin is gone.", "it was removed.", "put it back."),
            1,
            "DataError: a.bin is gone.\n  why:  it",
        ),
        (UsageError("no.", mend="yes."), 2, "UsageError: no.\n  mend: yes."),
        (KeyboardInterrupt(), 130, "interrupted"),
        (main.Terminated(), 143, "terminated"),
        (
            PermissionError(errno.EACCES, "Permission denied", "x.json"),
            1,
            "cannot use x.json: Permission denied.",
        ),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failing_with(error, monkeypatch) == code
    found = capsys.readouterr()
    assert found.err.startswith(("RedlineError: " if "cannot use" in says else "") + says) and found.out == ""


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        failing_with(ZeroDivisionError(), monkeypatch)


def test_sigterm_is_like_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half written is cleaned up on the way out; the handler of before is back afterwards."""
    cleaned = []

    def run(argv: object) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
        return 0

    monkeypatch.setattr(main, "run_command", run)
    assert main.main([]) == 143
    assert cleaned == [True] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_closed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started with `>&- 2>&-`, where Python has None for them."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        assert main.main(["--help"]) == 0
        assert main.main(["nonsense"]) == 2
        sys.stdout.close()
        sys.stderr.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench step --steps 0", "--steps 0: not a whole number above 0"),
        ("bench data --tokens many", "--tokens many"),
        ("bench data --token 5", "knows no '--token'"),
        ("bench step --out", "--out needs a value"),
    ],
)
def test_bench_usage(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("place", ["folder", "file/out.json", "/proc/nowhere/out.json"])
def test_bench_refuses_its_output_before_measuring(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    Path("file").write_text("mine")
    monkeypatch.setattr(bench, "_data", lambda words: pytest.fail("it measured"))
    assert main.main(["bench", "data", "--out", place]) == 1
    assert f"cannot write {place}" in capsys.readouterr().err
    assert Path("file").read_text() == "mine"
