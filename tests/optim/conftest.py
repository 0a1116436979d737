"""A test that takes `device` runs on the CPU and, by marker, on a GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
