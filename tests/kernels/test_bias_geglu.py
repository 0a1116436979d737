"""Bias + GEGLU against float64: with and without bias and clamp, every dtype, odd shapes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_operator_no_worse, gradients
from wide import wide_rows

from redline.errors import ConfigError, ShapeError
from redline.kernels.activation_reference import CURVES
from redline.kernels.bias_geglu import bias_geglu, supports
from redline.kernels.bias_geglu.reference import bias_geglu_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _tensors(device, dtype, rows, cols, has_bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(rows, 2 * cols, generator=generator)).to(device, dtype)
    bias = torch.randn(2 * cols, generator=generator).to(device, dtype) if has_bias else None
    return x, bias, torch.randn(rows, cols, generator=generator).to(device, dtype)


def _unfused(x, bias, form, clamp, offset):
    """Every operation in the tensors' dtype, as plain modules do it."""
    x = x if bias is None else x + bias
    gate, up = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return CURVES[form](gate) * (up + offset)


def _check(device, dtype, rows, cols, has_bias, form, clamp, offset, seed=0):
    x, bias, dy = _tensors(device, dtype, rows, cols, has_bias, seed)
    assert_operator_no_worse(
        lambda x, b: bias_geglu(x, b, approximate=form, clamp=clamp, offset=offset, impl="triton"),
        lambda x, b: _unfused(x, b, form, clamp, offset),
        lambda x, b: bias_geglu_reference(x, b, form, clamp, offset),
        (x, bias),
        [dy],
        ("y", "dx", "dbias"),
        f"{dtype} {rows}x{cols}",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["tanh", "exact", "quick"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 64), (2, 1031)])
def test_no_worse_than_unfused(device, dtype, form, rows, cols):
    _check(device, dtype, rows, cols, True, form, None, 0.0)


@wide_rows(
    dtype=st.sampled_from(DTYPES), has_bias=st.booleans(), form=st.sampled_from(["tanh", "exact", "quick"])
)
def test_any_width(device, rows, cols, dtype, has_bias, form):
    _check(device, dtype, rows, cols, has_bias, form, None, 0.0, seed=cols)


def test_wide_hidden(device):
    _check(device, torch.bfloat16, 1, 8191, True, "tanh", None, 0.0)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70), cols=st.integers(1, 400), dtype=st.sampled_from(DTYPES), has_bias=st.booleans(),
    form=st.sampled_from(["tanh", "exact", "quick"]),
    clamp=st.sampled_from([None, 0.75, 7.0]), offset=st.sampled_from([0.0, 1.0]),
)  # fmt: skip
def test_any_shape(device, rows, cols, dtype, has_bias, form, clamp, offset):
    # A value near the clamp may round across it in bf16 and lose its gradient; fp32 has no such step.
    _check(device, torch.float32 if clamp else dtype, rows, cols, has_bias, form, clamp, offset, seed=cols)


def test_clamp_stops_gradient_and_keeps_nan(device):
    x = torch.tensor([[9.0, -9.0, float("nan"), 1.0, 1.0, -9.0, 1.0, 1.0]], device=device, requires_grad=True)
    y = bias_geglu(x, clamp=2.0, impl="triton")
    assert y.isnan().tolist() == [[False, False, True, False]]
    y[:, [0, 1, 3]].sum().backward()
    assert x.grad[0, 0] == 0  # gate above the limit
    assert x.grad[0, 1] != 0  # gate below minus the limit: clamped from above only
    assert x.grad[0, 5] == 0  # up below minus the limit


@pytest.mark.parametrize("view", ["every second column", "transposed", "expanded rows", "row slice"])
def test_strides_b015(device, view):
    """B015: any strides give what the contiguous copy gives, bit for bit, forward and backward."""
    base = torch.randn(6, 4, 64, device=device)
    x = (
        {
            "every second column": base[..., ::2],
            "transposed": base.transpose(0, 1),
            "expanded rows": base[:1, :1].expand(6, 4, 64),
            "row slice": base[..., 1:31],
        }[view]
        .detach()
        .requires_grad_()
    )
    dy = (
        torch.randn(*x.shape[:-1], x.shape[-1] // 2, device=device)
        .transpose(0, 1)
        .contiguous()
        .transpose(0, 1)
    )
    y, copy = bias_geglu(x, impl="triton"), x.detach().contiguous().requires_grad_()
    expected = bias_geglu(copy, impl="triton")
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(out, leaf, dy)[0] for out, leaf in ((y, x), (expected, copy))))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_main_grad_with_two_forwards_in_flight(device, impl):
    x, bias, dy = _tensors(device, torch.float32, 19, 24, True)
    bias.requires_grad_()
    main_grad = torch.full((48,), 2.0, device=device)
    first, second = (bias_geglu(x * k, bias, main_grad=main_grad, impl=impl) for k in (1, 2))
    first.backward(dy)
    second.backward(dy)
    assert bias.grad is None
    exact = bias.detach().double().requires_grad_()
    for k in (1, 2):
        bias_geglu_reference(x.double() * k, exact).backward(dy.double())
    torch.testing.assert_close(
        main_grad.double(), exact.grad + 2.0, rtol=1e-5, atol=1e-5
    )  # fp32 sums of 38 terms


def test_compiles_without_graph_break(device):
    x, bias, dy = _tensors(device, torch.float32, 6, 24, True)

    def block(x, bias, main_grad):
        return bias_geglu(x * 2, bias, main_grad=main_grad, impl="triton") + bias_geglu(x, impl="triton")

    results = []
    for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaf, parameter, main_grad = (
            x.clone().requires_grad_(),
            bias.clone().requires_grad_(),
            torch.zeros_like(bias),
        )
        y = fn(leaf, parameter, main_grad)
        y.backward(dy)
        results.append((y, leaf.grad, main_grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert results[0][2].abs().sum() > 0


def test_deterministic(device):
    x, bias, dy = _tensors(device, torch.bfloat16, 70, 40, True)
    runs = [gradients(lambda x, b: bias_geglu(x, b, impl="triton"), (x, bias), [dy]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_empty_and_refusals(device):
    x = torch.empty(3, 0, 16, device=device, requires_grad=True)
    bias = torch.ones(16, device=device, requires_grad=True)
    bias_geglu(x, bias, impl="triton").sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(bias.grad, torch.zeros(16, device=device))
    with pytest.raises(ShapeError, match="not even"):
        bias_geglu(torch.zeros(2, 5, device=device))
    with pytest.raises(ShapeError, match="bias"):
        bias_geglu(torch.zeros(2, 4, device=device), torch.zeros(2, device=device))
    with pytest.raises(ShapeError, match="approximate"):
        bias_geglu(torch.zeros(2, 4, device=device), approximate="none")
    wide = torch.zeros(2, 4, device=device, dtype=torch.float64)
    assert "float64" in supports(wide)
    with pytest.raises(ConfigError, match="float64"):
        bias_geglu(wide, impl="triton")
