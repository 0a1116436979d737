"""Triton's interpreter as it is released computes nothing to train with: who asks for it there is told so."""

from __future__ import annotations

import numpy as np
import pytest

from redline.kernels.common import why_not_interpreted


@pytest.fixture
def interpreter(device):
    """The mended interpreter's module."""
    if device == "cuda":
        pytest.skip("kernels run on the GPU here")
    from triton.runtime import interpreter

    return interpreter


def test_the_mended_one_may_run(interpreter):
    assert why_not_interpreted() is None


def test_one_that_cannot_loop_may_not(interpreter, monkeypatch):
    """As with NumPy 2.4: an array of one element is no int."""
    patch = interpreter._patch_lang_tensor

    def index(tensor):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    def patch_as_released(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", index)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_as_released)
    told = why_not_interpreted()
    assert told is not None and "TRITON_INTERPRET" in told and "only 0-dimensional arrays" in told
    assert f"NumPy {np.__version__}" in told


def test_one_that_truncates_may_not(interpreter, monkeypatch):
    convert = interpreter._convert_float

    def truncate(data, source, target, rounding_mode):
        if target.name != "bf16":
            return convert(data, source, target, rounding_mode)
        return (np.ascontiguousarray(data).view(np.uint32) >> 16).astype(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", truncate)
    assert "truncates to bf16" in (why_not_interpreted() or "")
