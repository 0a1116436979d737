"""Bias + squared ReLU against float64."""

from __future__ import annotations

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_operator_no_worse, gradients
from wide import wide_rows

from redline.kernels.bias_squared_relu import bias_squared_relu
from redline.kernels.bias_squared_relu.reference import bias_squared_relu_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
fused = functools.partial(bias_squared_relu, impl="triton")


def _unfused(x, bias):
    """Every operation in the tensors' dtype, as plain modules do it."""
    return torch.relu(x if bias is None else x + bias).square()


def _check(device, rows, cols, dtype, has_bias):
    generator = torch.Generator().manual_seed(cols)
    x, dy = (torch.randn(rows, cols, generator=generator).to(device, dtype) for _ in "xy")
    bias = torch.randn(cols, generator=generator).to(device, dtype) if has_bias else None
    names, what = ("y", "dx", "dbias"), f"{dtype} {rows}x{cols}"
    assert_operator_no_worse(fused, _unfused, bias_squared_relu_reference, (x, bias), [dy], names, what)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70), cols=st.integers(1, 400), dtype=st.sampled_from(DTYPES), has_bias=st.booleans()
)
def test_any_shape_is_no_worse_than_unfused(device, rows, cols, dtype, has_bias):
    _check(device, rows, cols, dtype, has_bias)


@wide_rows(dtype=st.sampled_from(DTYPES), has_bias=st.booleans())
def test_any_width(device, rows, cols, dtype, has_bias):
    _check(device, rows, cols, dtype, has_bias)


def test_wide_hidden(device):
    _check(device, 1, 8191, torch.bfloat16, True)


def test_tails_and_nan(device):
    """Below 0 nothing, and no gradient, down to -inf; a NaN stays one."""
    x = torch.tensor([[-float("inf"), -30.0, 0.0, 3.0, 1e4, float("nan")]], device=device)
    y, dx = gradients(fused, [x], [torch.ones_like(x)])
    assert y[0, :5].tolist() == [0.0, 0.0, 0.0, 9.0, 1e8]
    assert dx[0, :5].tolist() == [0.0, 0.0, 0.0, 6.0, 2e4]
    assert torch.isnan(y[0, 5]) and torch.isnan(dx[0, 5])
