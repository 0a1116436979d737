"""Bias + squared ReLU against float64. Strides: the operator is that of test_bias_gelu."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_operator_no_worse, gradients
from wide import wide_rows

from redline.errors import ConfigError, ShapeError
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


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_main_grad(device, impl):
    x = torch.randn(19, 24, device=device)
    bias = torch.randn(24, device=device, requires_grad=True)
    main_grad = torch.full((24,), 2.0, device=device)
    bias_squared_relu(x, bias, main_grad=main_grad, impl=impl).sum().backward()
    assert bias.grad is None
    want = 2.0 + 2.0 * (x.double() + bias.double()).relu().sum(0)
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-5, atol=1e-5)  # fp32 sums of 19 terms


def test_compiles_without_graph_break(device):
    x, bias = torch.randn(6, 24, device=device), torch.randn(24, device=device)

    def block(x, bias):
        return fused(x * 2, bias) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(*(gradients(each, (x, bias), [x]) for each in (block, compiled)), strict=True):
        torch.testing.assert_close(traced, eager)


def test_refusals(device):
    with pytest.raises(ShapeError, match="bias_squared_relu: the bias does not fit"):
        bias_squared_relu(torch.zeros(2, 4, device=device), torch.zeros(2, device=device))
    with pytest.raises(ConfigError, match="float64"):
        bias_squared_relu(torch.zeros(2, 4, device=device, dtype=torch.float64), impl="triton")
