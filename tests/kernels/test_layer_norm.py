"""LayerNorm against float64: alone, with the residual addition, every dtype, odd shapes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_operator_no_worse, assert_same, gradients
from wide import NORM_COLUMNS, wide_rows

from redline.errors import ConfigError, ShapeError
from redline.kernels.layer_norm import add_layer_norm, layer_norm, supports
from redline.kernels.layer_norm.reference import add_layer_norm_reference, layer_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS_COLS = [(1, 7), (5, 64), (3, 129), (17, 256), (2, 1000), (40, 96), (2, 11)]
EPS = 1e-5


def _tensors(device, dtype, rows, cols, has_bias=True, seed=0):
    """A mean far from 0 shows a variance computed by cancellation."""
    generator = torch.Generator().manual_seed(seed)
    x, residual, dy, dsum = (torch.randn(rows, cols, generator=generator) for _ in range(4))
    weight, bias = 1.0 + 0.2 * torch.randn(cols, generator=generator), torch.randn(cols, generator=generator)
    bias = bias.to(device, dtype) if has_bias else None
    x, residual, weight, dy, dsum = (t.to(device, dtype) for t in (x + 3.0, residual, weight, dy, dsum))
    return x, residual, weight, bias, dy, dsum


def _unfused(x, weight, bias, zero_centered):
    """The path without the kernel: PyTorch's own layer_norm in the tensor's dtype."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, EPS)


def _check(device, dtype, rows, cols, has_bias=True, zero_centered=False, seed=0):
    x, _, weight, bias, dy, _ = _tensors(device, dtype, rows, cols, has_bias, seed)
    # x near 3 has steps four times those of x - mean near 1, which both fp32 paths meet alike.
    assert_operator_no_worse(
        lambda *a: layer_norm(*a, EPS, zero_centered=zero_centered, impl="triton"),
        lambda *a: _unfused(*a, zero_centered),
        lambda *a: layer_norm_reference(*a, EPS, zero_centered),
        (x, weight, bias),
        [dy],
        ("y", "dx", "dweight", "dbias"),
        f"{dtype} {rows}x{cols}",
        ulps=16,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), ROWS_COLS)
def test_no_worse_than_unfused(device, dtype, rows, cols):
    _check(device, dtype, rows, cols)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 24), cols=st.integers(7, 700), dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(), zero_centered=st.booleans(),
)  # fmt: skip
def test_any_shape(device, rows, cols, dtype, has_bias, zero_centered):
    _check(device, dtype, rows, cols, has_bias, zero_centered, seed=rows)


@wide_rows(
    cols=NORM_COLUMNS, dtype=st.sampled_from(DTYPES), has_bias=st.booleans(), zero_centered=st.booleans()
)
def test_any_width(device, rows, cols, dtype, has_bias, zero_centered):
    _check(device, dtype, rows, cols, has_bias, zero_centered, seed=rows)


def _check_add(device, dtype, rows, cols, has_bias, zero_centered):
    """With a residual, and a gradient of the sum as well."""
    x, residual, weight, bias, dy, dsum = _tensors(device, dtype, rows, cols, has_bias, seed=cols)

    def unfused(x, residual, weight, bias):
        total = x + residual
        return _unfused(total, weight, bias, zero_centered), total

    assert_operator_no_worse(
        lambda *a: add_layer_norm(*a, EPS, zero_centered=zero_centered, impl="triton"),
        unfused,
        lambda *a: add_layer_norm_reference(*a, EPS, zero_centered),
        (x, residual, weight, bias),
        [dy, dsum],
        ("y", "sum", "dx", "dresidual", "dweight", "dbias"),
        ulps=16,
    )


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20), cols=st.integers(5, 300), dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(), zero_centered=st.booleans(),
)  # fmt: skip
def test_add_layer_norm(device, rows, cols, dtype, has_bias, zero_centered):
    _check_add(device, dtype, rows, cols, has_bias, zero_centered)


@wide_rows(
    cols=NORM_COLUMNS, dtype=st.sampled_from(DTYPES), has_bias=st.booleans(), zero_centered=st.booleans()
)
def test_add_layer_norm_of_any_width(device, rows, cols, dtype, has_bias, zero_centered):
    _check_add(device, dtype, rows, cols, has_bias, zero_centered)


@pytest.mark.parametrize("cols", [8191, 8192, 8209])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_takes_several_wide_rows(device, dtype, cols):
    """Up to 8,192 columns backward has two steps ahead, above none. The interpreter has 3 programs."""
    _check_add(device, dtype, 5 if device == "cpu" else 3000, cols, True, True)


@pytest.mark.parametrize("cols", [4096, 4097, 6144, 6145, 8192, 12289])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_read_again(device, dtype, cols):
    """On either side of each choice of chunks."""
    _check(device, dtype, 3, cols, True, True)


@pytest.mark.parametrize("cols", [512, 5120])
def test_large_mean_does_not_cancel(device, cols):
    """Mean 1000, deviation 1, in fp32: E[x^2] - E[x]^2 would be off by percents; two passes are not."""
    x = 1000.0 + torch.randn(4, cols, device=device)
    weight = torch.ones(cols, device=device)
    exact = layer_norm_reference(x.double(), weight.double(), None, EPS)
    # the step of fp32 at 1000 is 6e-5, and x itself is exact: the mean's rounding is all that is left
    torch.testing.assert_close(layer_norm(x, weight, impl="triton").double(), exact, rtol=0, atol=1e-4)


def test_fp32_residual_stream_with_bf16_output(device):
    x, residual, weight, bias, _, _ = _tensors(device, torch.bfloat16, 6, 48)
    y, total = add_layer_norm(x, residual.float(), weight, bias, EPS, impl="triton")
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual.float())


@pytest.mark.parametrize("view", ["every second column", "transposed", "expanded rows", "offset"])
def test_strides_b015(device, view):
    """B015: any strides give what the contiguous copy gives, bit for bit, forward and backward."""
    base = torch.randn(6, 4, 64, device=device)
    x = {
        "every second column": base[..., ::2],
        "transposed": base.transpose(0, 2),
        "expanded rows": base[:1, :1].expand(6, 4, 64),
        "offset": base[..., 3:20],
    }[view]
    weight, bias = torch.randn(2, x.shape[-1], device=device).unbind()
    dy = torch.randn(x.shape[::-1], device=device).permute(2, 1, 0)
    results = []
    for leaf in (x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()):
        y = layer_norm(leaf, weight, bias, EPS, impl="triton")
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    for strided, copied in zip(*results, strict=True):
        assert_same(strided, copied)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_main_grads_with_two_forwards_in_flight(device, impl):
    x1, x2, weight, bias, dy1, dy2 = _tensors(device, torch.float32, 9, 40)
    weight.requires_grad_(), bias.requires_grad_()
    weight_grad, bias_grad = torch.full((40,), 3.0, device=device), torch.full((40,), -1.0, device=device)
    outputs = [
        layer_norm(x, weight, bias, EPS, main_grad=weight_grad, bias_main_grad=bias_grad, impl=impl)
        for x in (x1, x2)
    ]
    for y, dy in zip(outputs, (dy1, dy2), strict=True):
        y.backward(dy)
    assert weight.grad is None
    assert bias.grad is None
    exact = [t.detach().double().requires_grad_() for t in (weight, bias)]
    for x, dy in ((x1, dy1), (x2, dy2)):
        layer_norm_reference(x.double(), *exact, EPS).backward(dy.double())
    # fp32 sums of 18 products
    torch.testing.assert_close(weight_grad.double(), exact[0].grad + 3.0, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias_grad.double(), exact[1].grad - 1.0, rtol=1e-5, atol=1e-5)


def test_compiles_without_graph_break(device):
    x, residual, weight, bias, dy, _ = _tensors(device, torch.float32, 6, 24)

    def block(x, residual, weight, bias, weight_grad, bias_grad):
        grads = {"main_grad": weight_grad, "bias_main_grad": bias_grad}
        y, total = add_layer_norm(x, residual, weight, bias, EPS, **grads, impl="triton")
        return layer_norm(y * 2, weight, bias, EPS, impl="triton") + total

    results = []
    for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
        main_grads = torch.zeros(24, device=device), torch.zeros(24, device=device)
        y = fn(*leaves, *main_grads)
        results.append([y, *torch.autograd.grad(y, leaves, dy), *main_grads])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert all(grad.abs().sum() > 0 for grad in results[1][-2:])


def test_deterministic(device):
    x, _, weight, bias, dy, _ = _tensors(device, torch.bfloat16, 33, 72)
    runs = [
        gradients(lambda *a: layer_norm(*a, EPS, impl="triton"), (x, weight, bias), [dy]) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_empty_and_refusals(device):
    x = torch.empty(3, 0, 16, device=device, requires_grad=True)
    weight, bias = (torch.ones(16, device=device, requires_grad=True) for _ in range(2))
    layer_norm(x, weight, bias, impl="triton").sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros(16, device=device))
    assert torch.equal(bias.grad, torch.zeros(16, device=device))
    with pytest.raises(ShapeError, match="does not fit"):
        layer_norm(torch.zeros(2, 16, device=device), weight, bias[:3])
    wide = torch.zeros(2, 16, dtype=torch.float64, device=device)
    assert "float64" in supports(wide, weight)
    with pytest.raises(ConfigError, match="float64"):
        layer_norm(wide, weight, impl="triton")
