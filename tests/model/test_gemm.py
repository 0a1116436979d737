"""The GEMM that adds its weight gradient to main_grad, and the reads of small parameters and embeddings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.model.gemm import linear
from redline.model.main_grad import embed, read

HALF = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def make(*size: int, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)


def leaf(tensor: Tensor, main_grad: torch.dtype | None = None) -> Tensor:
    tensor = tensor.clone().requires_grad_()
    if main_grad is not None:
        tensor.main_grad = torch.full_like(tensor, 0.5, dtype=main_grad, requires_grad=False)
    return tensor


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    lead=st.lists(st.integers(0, 4), min_size=1, max_size=2),
    size_in=st.integers(1, 7),
    size_out=st.integers(1, 7),
    bias=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "strided", "expanded"]),
    fuse=st.booleans(),
)
def test_gradients_of_any_shape_and_stride(lead, size_in, size_out, bias, layout, fuse):
    """B015's kind: no rows at all, odd sizes, and inputs whose last stride is not 1."""
    x = make(*lead, size_in)
    if layout == "transposed":
        x = make(size_in, *lead).permute(*range(1, len(lead) + 1), 0)
    elif layout == "strided":
        x = make(*lead, 2 * size_in)[..., ::2]
    elif layout == "expanded":
        x = make(*lead, 1).expand(*lead, size_in)
    x = x.detach().requires_grad_()
    plain_x, plain_w, plain_b = (
        t.detach().clone().requires_grad_() for t in (x, make(size_out, size_in), make(size_out))
    )
    for main_grad in (None, torch.float64):
        x.grad = plain_x.grad = plain_w.grad = plain_b.grad = None
        weight, bias_leaf = (
            leaf(plain_w.detach(), main_grad),
            leaf(plain_b.detach(), main_grad) if bias else None,
        )
        y = linear(x, weight, bias_leaf, fuse_wgrad=fuse)
        want = F.linear(plain_x, plain_w, plain_b if bias else None)
        torch.testing.assert_close(y, want)
        grad = make(*lead, size_out, seed=3)
        y.backward(grad)
        want.backward(grad)
        torch.testing.assert_close(x.grad, plain_x.grad)
        for got, plain in ((weight, plain_w), (bias_leaf, plain_b)):
            if got is None:
                continue
            if main_grad is None:
                torch.testing.assert_close(got.grad, plain.grad)
            else:
                assert got.grad is None
                torch.testing.assert_close(got.main_grad, plain.grad + 0.5)


def test_gradcheck():
    x, weight, bias = (leaf(make(*size)) for size in ((3, 2, 4), (5, 4), (5,)))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    index = torch.tensor([[1, 0], [4, 1]])
    assert torch.autograd.gradcheck(lambda w: embed(index, w), (weight,))
    assert torch.autograd.gradcheck(read, (bias,))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("fuse", [True, False])
def test_half_operands_and_an_fp32_gradient(dtype, fuse, device):
    """Fused, the sum is exact to fp32; unfused, each product is first rounded to the half dtype."""
    x, dy = make(67, 19, dtype=dtype, device=device), make(67, 13, dtype=dtype, seed=1, device=device)
    weight, bias = (
        leaf(make(13, 19, dtype=dtype, device=device), torch.float32),
        leaf(make(13, dtype=dtype, device=device), torch.float32),
    )
    for _ in range(2):
        linear(x, weight, bias, fuse_wgrad=fuse).backward(dy)
    exact = dy.double().T @ x.double()
    error = ((weight.main_grad.double() - 0.5 - 2 * exact).abs() / exact.abs().max()).max()
    assert error < (2.0**-20 if fuse else 2 * UNIT[dtype])
    torch.testing.assert_close(bias.main_grad.double() - 0.5, 2 * dy.double().sum(0), rtol=1e-5, atol=1e-5)
    if fuse:
        rounded = (exact.to(dtype).double() - exact).abs().max() / exact.abs().max()
        assert rounded > 2.0**-20  # the test can tell the two apart


def test_gradients_in_bf16(device):
    x, dy = (
        make(40, 6, dtype=torch.bfloat16, device=device),
        make(40, 5, dtype=torch.bfloat16, seed=1, device=device),
    )
    weight = leaf(make(5, 6, dtype=torch.bfloat16, device=device), torch.bfloat16)
    linear(x, weight).backward(dy)
    want = dy.double().T @ x.double() + 0.5
    assert weight.main_grad.dtype == torch.bfloat16
    assert ((weight.main_grad.double() - want).abs() <= UNIT[torch.bfloat16] * want.abs().max()).all()


def two_in_flight(x1: Tensor, x2: Tensor, parameters: list[Tensor], run) -> None:
    """Two forwards, then both backwards, as a pipeline does."""
    y1, y2 = run(x1, *parameters), run(x2, *parameters)
    y1.square().sum().backward()
    y2.square().sum().backward()


def two_layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, gain: Tensor) -> Tensor:
    return linear(torch.tanh(linear(x, w1, b1)) * read(gain), w2)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("main_grad", [None, torch.float64])
def test_two_forwards_in_flight(mode, main_grad):
    """main_grad must not be saved for backward: the first backward changes it under the second."""
    run = two_layers
    if mode == "compiled":
        torch.compiler.reset()
        run = torch.compile(two_layers, backend="aot_eager", fullgraph=True)
    x1, x2 = make(3, 2, 4, seed=1).requires_grad_(), make(3, 2, 4, seed=2).requires_grad_()
    values = [make(5, 4), make(5), make(3, 5), make(5)]
    parameters = [leaf(value, main_grad) for value in values]
    two_in_flight(x1, x2, parameters, run)
    got_x = [x1.grad, x2.grad]
    x1.grad = x2.grad = None
    plain = [value.clone().requires_grad_() for value in values]
    two_in_flight(
        x1, x2, plain, lambda x, w1, b1, w2, gain: F.linear(torch.tanh(F.linear(x, w1, b1)) * gain, w2)
    )
    torch.testing.assert_close(got_x, [x1.grad, x2.grad])
    for parameter, want in zip(parameters, plain, strict=True):
        if main_grad is None:
            torch.testing.assert_close(parameter.grad, want.grad)
        else:
            assert parameter.grad is None
            torch.testing.assert_close(parameter.main_grad, want.grad + 0.5)


def test_hooks_still_fire_where_backward_returned_none():
    """Overlapped reduction counts ready parameters by these hooks."""
    weight, fired = leaf(make(3, 4), torch.float64), []
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad))
    linear(make(2, 4), weight).sum().backward()
    assert fired == [None]


def test_frozen_parameters_and_evaluation_write_nothing():
    """B058's kind, and evaluation: no gradient where none is wanted."""
    weight, bias = leaf(make(3, 4), torch.float64), leaf(make(3), torch.float64)
    weight.requires_grad_(False)
    x = make(2, 4).requires_grad_()
    linear(x, weight, bias).sum().backward()
    assert torch.equal(weight.main_grad, torch.full_like(weight, 0.5))
    assert not torch.equal(bias.main_grad, torch.full_like(bias, 0.5).detach())
    before = bias.main_grad.clone()
    with torch.no_grad():
        assert not linear(x, weight, bias).requires_grad
    assert torch.equal(bias.main_grad, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_adds_rows_to_main_grad(dtype, device):
    """A token seen twice adds twice, in the gradient's dtype; rows of unseen tokens stay as they are."""
    weight = leaf(make(6, 3, dtype=dtype, device=device), torch.float32)
    index = torch.tensor([[5, 0], [2, 5]], device=device).T
    dy = make(2, 2, 3, dtype=dtype, seed=4, device=device)
    rows = embed(index, weight)
    assert torch.equal(rows, weight[index])
    rows.backward(dy)
    want = torch.full((6, 3), 0.5, device=device)
    for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        want[index[place]] += dy[place].float()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, want)
