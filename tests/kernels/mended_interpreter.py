"""Triton's interpreter for a test session on a machine without a GPU; importable from any folder of tests."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from quick_interpreter import quicken

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mend() -> None:
    """Mend faults of Triton 3.6's interpreter and its waste of time, once a process; not on a GPU."""
    if DEVICE == "cuda":
        return
    from triton.language import bfloat16, float8e4nv, float8e5, float32
    from triton.runtime import interpreter

    if getattr(interpreter, "_mended", False):
        return
    FP8 = {float8e4nv: torch.float8_e4m3fn, float8e5: torch.float8_e5m2}
    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def round_to_nearest_even(data, source, target, rounding_mode):
        """The interpreter truncates to bf16 and fp8 (and loses a carry when told to round); GPUs round."""
        if source == float32 and target in FP8:
            return torch.from_numpy(np.array(data)).to(FP8[target]).view(torch.uint8).numpy()
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

    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_values(builder, a, b, d, input_precision, max_num_imprecise_acc):
        """The interpreter holds bf16 as its bits in 16-bit integers, and multiplies those."""
        if a.dtype == bfloat16:
            a, b = (
                interpreter.TensorHandle(
                    convert(each.data, bfloat16, float32, None).view(np.float32), float32
                )
                for each in (a, b)
            )
        return dot(builder, a, b, d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = dot_of_values
    np.seterr(over="ignore")  # exp of a large number is inf on a GPU, without a warning
    interpreter._convert_float = round_to_nearest_even
    interpreter._patch_lang_tensor = patch_tensor_index
    quicken(interpreter)
    interpreter._mended = True


@pytest.fixture
def kernel_device() -> str:
    """Where fused operators run in this session."""
    if DEVICE == "cpu":
        pytest.importorskip("triton", reason="the package triton is not installed")
    mend()
    return DEVICE
