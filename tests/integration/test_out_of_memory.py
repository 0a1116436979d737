"""Out of memory: a warning before, an error after, both with flags that would fit."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.config import parse_args
from redline.hardware import Hardware
from redline.model import Transformer
from redline.plan.lighter import lighter_changes

from .conftest import TINY

SMALL = TINY.replace("--micro-batch-size 2", "--micro-batch-size 4") + " --num-layers 6 --bf16"


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
        MemoryError(),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    ],
    ids=["gpu", "cpu", "python", "pinned", "triton", "cublas", "nccl"],
)
def test_the_error_names_what_was_predicted_what_is_there_and_what_would_fit(
    redline: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(Transformer, "loss", fail)
    # The search for what would fit stops after a second or two, in which a busy machine may find nothing.
    monkeypatch.setattr("redline.run.memory.lighter_changes", partial(lighter_changes, seconds=60))
    code, _, err = redline(f"train {SMALL} --save run")
    assert code == 1 and "has no memory left for this run" in err
    assert "were predicted, and" in err and "are available" in err
    mend = err.split("mend: ")[1]
    flags = [part.split(") ", 1)[1].rsplit(" (", 1)[0] for part in mend.split("; ")[:3]]
    for each in flags:  # the flags are flags, and go with the run
        parse_args(shlex.split(f"{SMALL} {each}"))


def test_other_failures_are_not_called_out_of_memory(redline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Transformer, "loss", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        redline(f"train {SMALL} --save run")


def test_a_run_that_will_not_fit_is_warned_of_before_it_allocates(
    redline: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = Hardware(kind="cpu", name="a small machine", memory_bytes=1_000_000)
    monkeypatch.setattr("redline.run.opening.detect", lambda _: small)
    code, out, err = redline(f"train {SMALL} --save run")
    assert code == 0, err
    warned = next(line for line in out.splitlines() if line.startswith("warning: "))
    assert "a small machine has 976.56 KiB" in warned and "redline memory" in warned
