"""Help, plans and refusals answer at once: without importing torch, so also on a machine that has none.

No wall time is asserted, which would hang on the machine: what costs the time is imported or it is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

# Each import costs from a tenth of a second to several.
HEAVY = ("torch", "numpy", "triton", "tensorboard", "tokenizers", "safetensors", "pydantic")


@pytest.fixture(scope="module")
def barred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose modules stand before the real ones and refuse to be imported."""
    return bar(tmp_path_factory.mktemp("barred"), HEAVY)


def bar(folder: Path, names: Iterable[str]) -> Path:
    for name in names:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is barred')\n")
    return folder


def answer(barred: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(barred), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "redline", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        cwd=barred,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "usage: redline COMMAND"),
        ("--help", "usage: redline COMMAND"),
        ("--version", "redline "),
        ("train --help", "--seq-length"),
        ("train --help-all", "--tensor-model-parallel-size"),
        ("train --preset llama3-8b --mock-data --train-iters 1 --print-config", "seq_length"),
        ("memory --preset llama3-8b", "8,030,261,248"),
        ("memory --preset llama3-8b --gpu h200 --json", '"total"'),
        ("bench --help", "bench"),
        ("report --help", "--price-per-gpu-hour"),
    ],
)
def test_answers_without_torch(barred: Path, words: str, said: str) -> None:
    done = answer(barred, *words.split())
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "did you mean `redline train`?"),
        ("train --hiden-size 64", "did you mean --hidden-size?"),
        ("train --num-layers 2 --hidden-size 100 --num-attention-heads 3", "rule: heads-divide-hidden"),
        ("train --pipeline-model-parallel-size 2", "rule: not-available-yet/pipeline-parallel"),
        ("memory --preset llama3-8b --gpu h1000", "no data sheet"),
    ],
)
def test_refuses_without_torch(barred: Path, words: str, said: str) -> None:
    done = answer(barred, *words.split())
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_data_is_prepared_without_torch(tmp_path: Path) -> None:
    """It needs NumPy and the tokenizers; a machine that only prepares data has no torch."""
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    bar(tmp_path, ["torch"])
    words = "data prepare text.jsonl --output-prefix out --tokenizer-type ByteTokenizer"
    done = answer(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out_text_document.bin").stat().st_size > 0
    assert answer(tmp_path, "data", "inspect", "out_text_document").returncode == 0


def test_training_does_need_torch(barred: Path) -> None:
    """The bar works: what trains runs into it."""
    words = "train --preset demo --mock-data --vocab-size 64 --train-iters 1"
    done = answer(barred, *words.split())
    assert done.returncode != 0 and "torch is barred" in done.stderr
