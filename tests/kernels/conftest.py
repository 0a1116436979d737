"""Kernel tests run on a GPU where there is one, else under Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported

sys.path.insert(0, str(Path(__file__).parent))  # test modules import kernel_accuracy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def _mended_interpreter() -> None:
    """Faults of Triton 3.6's interpreter, mended for the session; on a GPU nothing is touched."""
    if DEVICE == "cuda":
        return
    pytest.importorskip("triton", reason="the package triton is not installed")
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def round_to_nearest_even(data, source, target, rounding_mode):
        """The interpreter truncates fp32 -> bf16 (and loses a carry when told to round); GPUs round."""
        if (source, target) != (float32, bfloat16):
            return convert(data, source, target, rounding_mode)
        data = np.ascontiguousarray(data)
        bits = data.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data.view(np.float32)), np.uint16(0x7FC0), rounded)

    def patch_tensor_index(tensor, scope):
        """numpy 2.4 no longer turns an array of one element into an int, which `range` over scalars needs."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    np.seterr(over="ignore")  # exp of a large number is inf on a GPU, without a warning
    interpreter._convert_float = round_to_nearest_even
    interpreter._patch_lang_tensor = patch_tensor_index
