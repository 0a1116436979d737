"""What every fused activation keeps: strides, main_grad, compilation, determinism, no rows, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from activation_inputs import activation_inputs
from kernel_accuracy import gradients
from torch import Tensor

from redline.errors import ConfigError, ShapeError
from redline.kernels.activation_op import supports
from redline.kernels.bias_geglu import bias_geglu
from redline.kernels.bias_geglu.reference import bias_geglu_reference
from redline.kernels.bias_gelu import bias_gelu
from redline.kernels.bias_gelu.reference import bias_gelu_reference
from redline.kernels.bias_squared_relu import bias_squared_relu
from redline.kernels.bias_squared_relu.reference import bias_squared_relu_reference
from redline.kernels.bias_swiglu import bias_swiglu
from redline.kernels.bias_swiglu.reference import bias_swiglu_reference


class Activation(NamedTuple):
    """An operator, its plain twin, and how many columns make one."""

    fused: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    halves: int


ACTIVATIONS = {
    "bias_gelu": Activation(bias_gelu, bias_gelu_reference, 1),
    "bias_squared_relu": Activation(bias_squared_relu, bias_squared_relu_reference, 1),
    "bias_geglu": Activation(bias_geglu, bias_geglu_reference, 2),
    "bias_swiglu": Activation(bias_swiglu, bias_swiglu_reference, 2),
}


@pytest.fixture(params=ACTIVATIONS)
def activation(request: pytest.FixtureRequest) -> Activation:
    return ACTIVATIONS[request.param]


@pytest.mark.parametrize("view", ["every second column", "transposed", "expanded rows", "row slice"])
def test_strides_b015(device, activation, view):
    """B015: any strides give what the contiguous copy gives, bit for bit, forward and backward."""
    base = torch.randn(6, 4, 64, device=device)
    seen = {
        "every second column": base[..., ::2],
        "transposed": base.transpose(0, 1),
        "expanded rows": base[:1, :1].expand(6, 4, 64),
        "row slice": base[..., 1:31],
    }[view]
    x, copy = seen.detach().requires_grad_(), seen.detach().contiguous().requires_grad_()
    dy = torch.randn(x.shape[1], x.shape[0], x.shape[2] // activation.halves, device=device).transpose(0, 1)
    y, expected = activation.fused(x, impl="triton"), activation.fused(copy, impl="triton")
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(out, leaf, dy)[0] for out, leaf in ((y, x), (expected, copy))))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_main_grad_with_two_forwards_in_flight(device, activation, impl):
    x, bias, dy = activation_inputs(device, torch.float32, 19, 24, halves=activation.halves)
    bias.requires_grad_()
    main_grad = torch.full_like(bias, 2.0, requires_grad=False)
    first, second = (activation.fused(x * k, bias, main_grad=main_grad, impl=impl) for k in (1, 2))
    first.backward(dy)
    second.backward(dy)
    assert bias.grad is None
    exact = bias.detach().double().requires_grad_()
    for k in (1, 2):
        activation.reference(x.double() * k, exact).backward(dy.double())
    want = exact.grad + 2.0
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-5, atol=1e-5)  # fp32 sums of 38 terms


def test_compiles_without_graph_break(device, activation):
    x, bias, dy = activation_inputs(device, torch.float32, 6, 24, halves=activation.halves)
    fused = activation.fused

    def block(x, bias, main_grad):
        return fused(x * 2, bias, main_grad=main_grad, impl="triton") + fused(x, impl="triton")

    results = []
    for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaf, parameter = x.clone().requires_grad_(), bias.clone().requires_grad_()
        main_grad = torch.zeros_like(bias)
        y = fn(leaf, parameter, main_grad)
        y.backward(dy)
        results.append((y, leaf.grad, main_grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert results[0][2].abs().sum() > 0


def test_deterministic(device, activation):
    x, bias, dy = activation_inputs(device, torch.bfloat16, 70, 40, halves=activation.halves)
    runs = [gradients(lambda x, b: activation.fused(x, b, impl="triton"), (x, bias), [dy]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_without_a_row(device, activation):
    x = torch.empty(3, 0, 16, device=device, requires_grad=True)
    bias = torch.ones(16, device=device, requires_grad=True)
    activation.fused(x, bias, impl="triton").sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(bias.grad, torch.zeros(16, device=device))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_refusals(device, name):
    fused = ACTIVATIONS[name].fused
    with pytest.raises(ShapeError, match=f"{name}: the bias does not fit"):
        fused(torch.zeros(2, 4, device=device), torch.zeros(2, device=device))
    wide = torch.zeros(2, 4, device=device, dtype=torch.float64)
    assert "float64" in supports(wide)
    with pytest.raises(ConfigError, match="float64"):
        fused(wide, impl="triton")


@pytest.mark.parametrize("name", ["bias_geglu", "bias_swiglu"])
def test_a_gated_one_takes_even_widths(device, name):
    with pytest.raises(ShapeError, match="not even"):
        ACTIVATIONS[name].fused(torch.zeros(2, 5, device=device))


@pytest.mark.parametrize("name", ["bias_gelu", "bias_geglu"])
def test_an_unknown_form(device, name):
    with pytest.raises(ShapeError, match="approximate"):
        ACTIVATIONS[name].fused(torch.zeros(2, 4, device=device), approximate="none")
