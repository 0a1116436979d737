"""Bias + GELU against float64: both forms, with and without bias, every dtype, odd shapes."""

from __future__ import annotations

import functools

import pytest
import torch
from activation_inputs import activation_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_operator_no_worse, gradients
from wide import wide_rows

from redline.kernels.bias_gelu import bias_gelu
from redline.kernels.bias_gelu.reference import bias_gelu_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _unfused(x, bias, form):
    """Every operation in the tensors' dtype, as plain modules do it."""
    x = x if bias is None else x + bias
    return torch.nn.functional.gelu(x, approximate="none" if form == "exact" else "tanh")


def _check(device, dtype, rows, cols, has_bias, form, seed=0):
    x, bias, dy = activation_inputs(device, dtype, rows, cols, halves=1, has_bias=has_bias, seed=seed)
    assert_operator_no_worse(
        lambda x, b: bias_gelu(x, b, approximate=form, impl="triton"),
        lambda x, b: _unfused(x, b, form),
        lambda x, b: bias_gelu_reference(x, b, form),
        (x, bias),
        [dy],
        ("y", "dx", "dbias"),
        f"{dtype} {rows}x{cols}",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["tanh", "exact"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 64), (2, 1031)])
def test_no_worse_than_unfused(device, dtype, form, rows, cols):
    _check(device, dtype, rows, cols, True, form)


@wide_rows(dtype=st.sampled_from(DTYPES), has_bias=st.booleans(), form=st.sampled_from(["tanh", "exact"]))
def test_any_width(device, rows, cols, dtype, has_bias, form):
    _check(device, dtype, rows, cols, has_bias, form, seed=cols)


def test_wide_hidden(device):
    _check(device, torch.bfloat16, 1, 16384, True, "tanh")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70), cols=st.integers(1, 400), dtype=st.sampled_from(DTYPES), has_bias=st.booleans(),
    form=st.sampled_from(["tanh", "exact"]),
)  # fmt: skip
def test_any_shape(device, rows, cols, dtype, has_bias, form):
    _check(device, dtype, rows, cols, has_bias, form, seed=cols)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_exact_without_erf_is_good_to_its_rounding(device, dtype):
    """Value by value, far into the tail and near the slope's zero, where a 2-norm over all sees nothing."""
    x = torch.linspace(-6.0, 6.0, 4001).to(device, dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, exact = bias_gelu(x, approximate="exact", impl="triton"), torch.nn.functional.gelu(wide)
    (slope,), (exact_slope,) = (torch.autograd.grad(out.sum(), leaf) for out, leaf in ((y, x), (exact, wide)))
    step, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for found, want, near in ((y, exact, 0.0), (slope, exact_slope, 6e-7)):  # the slope's parts cancel
        allowed = (step + 3e-6) * want.abs() + least + near
        assert ((found.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["tanh", "exact"])
def test_tails_and_nan(device, dtype, form):
    """Far out, gelu is 0 or the identity with slope 0 or 1; a NaN stays one, and an infinity."""
    x = torch.tensor([[-4096.0, -30.0, -0.0, 0.0, 30.0, 4096.0, float("inf"), float("nan")]]).to(
        device, dtype
    )
    fn = functools.partial(bias_gelu, approximate=form, impl="triton")
    y, dx = gradients(fn, [x], [torch.ones_like(x)])
    assert y[0, :6].tolist() == [0.0, 0.0, 0.0, 0.0, 30.0, 4096.0] and y[0, 2].signbit()
    assert dx[0, :6].tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert y[0, 6] == float("inf") and y[0, 7].isnan() and dx[0, 7].isnan()


@pytest.mark.parametrize("center", [-0.7518, 0.0])
def test_the_gradient_of_a_bias_is_as_good_in_fp32(device, center):
    """Beside an input of 16 bits, where exact GELU has no erf, and where the slope is next to nothing."""
    generator = torch.Generator().manual_seed(3)
    x = (center + 0.02 * torch.randn(64, 96, generator=generator)).to(device, torch.bfloat16)
    bias, main_grad = torch.zeros(96, device=device, requires_grad=True), torch.zeros(96, device=device)
    bias_gelu(x, bias, approximate="exact", main_grad=main_grad, impl="triton").sum().backward()
    wide = x.double().requires_grad_()
    torch.nn.functional.gelu(wide).sum().backward()
    torch.testing.assert_close(main_grad.double(), wide.grad.sum(0), rtol=3e-6, atol=64 * 6e-7)
