"""Tests of what is put around the model; test modules import model_cases and the kernels' interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from mended_interpreter import kernel_device

__all__ = ["kernel_device"]


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    """Graphs belong to the function they were compiled from, for the whole process: each test starts anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
