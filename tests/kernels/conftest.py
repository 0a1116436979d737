"""Kernel tests run on a GPU where there is one, else under Triton's interpreter on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test modules import kernel_accuracy

from mended_interpreter import DEVICE, mend


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def _mended_interpreter() -> None:
    if DEVICE == "cpu":
        pytest.importorskip("triton", reason="the package triton is not installed")
    mend()
