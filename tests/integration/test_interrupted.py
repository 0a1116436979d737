"""Processes that are stopped or lose their reader end as they should, and leave what the next try needs."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from .conftest import QUICK_START, TINY, Run

START = f"train {TINY}".replace("--train-iters 6", "--train-iters 3")
# Until it is stopped; should the tests be killed before, it ends by itself.
ENDLESS = "--train-iters 100000 --exit-duration-in-mins 5"


def start(folder: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "redline", *words],
        text=True,
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        # What a shell starts in the background ignores it, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    """`redline train | head -1`: the run is the folder, not the text; stderr says that nobody listens."""
    process = start(tmp_path, *f"{START} --save run --log-interval 1".split())
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(120) == 0
    assert err.startswith("stdout is lost (Broken pipe)") and len(err.splitlines()) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


def test_a_run_outlives_the_reader_of_both_streams(tmp_path: Path) -> None:
    """`redline train 2>&1 | head -1`: with nobody left to tell, it still finishes and saves."""
    process = start(tmp_path, *f"{START} --save run --log-interval 1".split(), stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """Without waiting for the step or the checkpoint, and the folder can be gone on with."""
    words = START.replace("--train-iters 3", ENDLESS)
    process = start(tmp_path, *words.split(), "--save", "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("SIGINT: finishing the step, then saving")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    # Either the second one was in time, or the run had ended by then.
    assert (process.returncode, err) in ((130, "interrupted\n"), (0, ""))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_preparing_is_stopped(tmp_path: Path, number: int) -> None:
    """Nothing half-written stays, and no worker does."""
    with open(tmp_path / "a.jsonl", "w") as handle:
        handle.writelines(json.dumps({"text": f"line {k} " * 40}) + "\n" for k in range(200_000))
    words = "data prepare a.jsonl --output-prefix d/out --tokenizer-type ByteTokenizer --workers 2"
    process = start(tmp_path, *words.split())
    wait_for(lambda: any((tmp_path / "d").glob(".out*")), process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)  # returns once no process holds the pipes any more
    assert process.returncode == 128 + number and "Traceback" not in err, err
    assert list((tmp_path / "d").iterdir()) == [] and out == ""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "w") as handle:
        handle.writelines(json.dumps({"text": f"line {k} " * 40}) + "\n" for k in range(200_000))
    words = "data prepare a.jsonl --output-prefix d/out --tokenizer-type ByteTokenizer --workers 2"
    process = start(tmp_path, *words.split())
    wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "d").glob(".out*")), process)
    process.kill()
    process.communicate(timeout=120)  # returns once no process holds the pipes any more
    assert not (tmp_path / "d" / "out_text_document.bin").exists()


@pytest.mark.parametrize("words", ["train --help", "memory --preset llama3-8b", "--help"])
def test_a_reader_that_has_read_enough(tmp_path: Path, words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(tmp_path, *words.split(), stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")


def test_output_on_a_full_disk(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start(tmp_path, "train", "--help", stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.startswith("RedlineError: cannot use the output: No space left on device.") and "mend:" in err


# Each training process is forked from one that has imported torch already.
SERVER = f"""
import os, sys
import redline.run, tensorboard.summary.writer.event_file_writer
from redline.cli.main import main
{QUICK_START}
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            code = main(line.split())
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_killed_at_random_moments_it_always_resumes_b100(tmp_path: Path) -> None:
    """B100, B104: SIGKILL in steps, evaluations and saves; one command goes on, to the very losses."""
    words = START.replace("--train-iters 3", "--train-iters 30 --save-interval 1 --eval-interval 3")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    metrics, kills, draw = tmp_path / "cut" / "metrics.jsonl", 0, random.Random(5)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=PIPE, stdout=PIPE, text=True, cwd=tmp_path, env=environment
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def run(name: str, kill_when: Callable[[], bool]) -> int:
            print(f"{words} --load {name} --save {name}", file=server.stdin, flush=True)
            child = os.pidfd_open(int(server.stdout.readline()))
            while not select.select([child], [], [], 0.002)[0]:
                if kill_when():
                    time.sleep(draw.uniform(0, 0.03))  # some part of a step or of a save
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                    break
            os.close(child)
            return int(server.stdout.readline())

        assert run("whole", lambda: False) == 0, (tmp_path / "log").read_text()
        code = -signal.SIGKILL
        while code != 0:
            enough = (metrics.stat().st_size if metrics.exists() else 0) + 400 * draw.randrange(1, 7)
            code = run("cut", lambda enough=enough: metrics.exists() and metrics.stat().st_size > enough)
            assert code in (0, -signal.SIGKILL), (tmp_path / "log").read_text()
            kills += code != 0
        server.stdin.close()
    cut, whole = Run(tmp_path / "cut", ""), Run(tmp_path / "whole", "")
    assert kills >= 4
    assert [record["step"] for record in cut.records()] == list(range(1, 31))
    assert cut.losses == whole.losses
    assert cut.valid_losses == whole.valid_losses
