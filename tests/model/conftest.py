"""The model tests run on a CPU, and on a GPU where there is one; test modules import model_cases.

Those of the fused implementation run once: on the GPU, else under Triton's interpreter on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from mended_interpreter import kernel_device

__all__ = ["kernel_device"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param
