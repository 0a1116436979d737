"""A test that takes `device` runs on the CPU and, by marker, on a GPU.

Those of the Triton update take `kernel_device`: the GPU, else the CPU under Triton's interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from mended_interpreter import kernel_device

__all__ = ["kernel_device"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
