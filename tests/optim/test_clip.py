from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from redline.optim.clip import ROW, clip_coefficient, count_nonzero, l2_norm
from redline.optim.flat import FlatBuffers

SIZES = st.lists(st.sampled_from([0, 1, 7, 64, 1000, ROW - 1, ROW, ROW + 1, 3 * ROW + 5]), max_size=4)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    sizes=SIZES,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_norm_against_float64(device, sizes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    exact = math.sqrt(sum(flat.double().square().sum().item() for flat in flats))
    # A row's sum of 2^12 positive terms in fp32, in 8 or more lanes of at most 2^9: random rounding errors
    # grow as sqrt(2^9) = 23 half-ulps (6e-8), halved by the square root.
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    assert l2_norm(flats, torch.device(device)).item() == pytest.approx(exact, rel=tolerance)


def test_norm_is_exact_where_one_long_fp32_sum_is_not():
    flat = torch.full((ROW * 2000,), 0.1)  # equal terms: every rounding goes the same way
    exact = flat[0].item() * math.sqrt(flat.numel())
    assert l2_norm([flat], flat.device).item() == pytest.approx(exact, rel=4e-6)
    assert torch.linalg.vector_norm(flat).item() != pytest.approx(exact, rel=1e-5)


def test_norm_does_not_depend_on_threads():
    flats = [torch.randn(size, generator=torch.Generator().manual_seed(3)) for size in (40 * ROW + 77, 40000)]
    threads = torch.get_num_threads()
    try:
        norms = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            norms.append(l2_norm(flats, torch.device("cpu")).item())
    finally:
        torch.set_num_threads(threads)
    assert norms[0] == norms[1] == norms[2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, ROW, 3 * ROW + 4])
def test_norm_lets_nonfinite_values_through(bad, place):
    flat = torch.ones(3 * ROW + 5)
    flat[place] = bad
    assert not math.isfinite(l2_norm([torch.ones(4), flat], flat.device).item())


def test_norm_survives_fp32_overflow_between_rows():
    """Each row's norm fits fp32, the sum of their squares does not."""
    flat = torch.full((64 * ROW,), 1e16)
    assert l2_norm([flat], flat.device).item() == pytest.approx(1e16 * math.sqrt(flat.numel()), rel=4e-6)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e9])
def test_clipping_equals_clip_grad_norm(device, max_norm):
    """Megatron's and PyTorch's formula are one: clip / (norm + 1e-6), at most 1."""
    parameters = {
        f"p{i}": nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)).double())
        for i, shape in enumerate([(30, 7), (11,), (200, 33)])
    }
    twins = [nn.Parameter(param.detach().clone()) for param in parameters.values()]
    for i, twin in enumerate(twins):
        twin.grad = torch.randn(twin.shape, generator=torch.Generator().manual_seed(50 + i)).double()
    buffers = FlatBuffers(
        parameters.items(), main_dtype=torch.float64, grad_dtype=torch.float64, device=device
    )
    for param, twin in zip(parameters.values(), twins, strict=True):
        param.main_grad.copy_(twin.grad)
    norm = l2_norm(buffers.flat("main_grad"), buffers.device)
    coefficient = clip_coefficient(norm, max_norm)
    expected = nn.utils.clip_grad_norm_(twins, max_norm)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-13)
    for param, twin in zip(parameters.values(), twins, strict=True):
        torch.testing.assert_close((param.main_grad * coefficient).cpu(), twin.grad, rtol=1e-13, atol=0)


def test_coefficient():
    norms = torch.tensor([0.0, 0.5, 2.0, 8.0], dtype=torch.float64)
    assert clip_coefficient(norms, 2.0).tolist() == pytest.approx(
        [1.0, 1.0, 2 / (2 + 1e-6), 2 / (8 + 1e-6)], rel=1e-12
    )
    assert clip_coefficient(norms, 0.0).tolist() == [1.0] * 4


def test_count_nonzero_ignores_padding(device):
    param = nn.Parameter(torch.ones(3, 3))
    buffers = FlatBuffers([("p", param)], main_dtype=torch.float32, grad_dtype=torch.float32, device=device)
    param.main_grad[0, 1] = 5.0
    param.main_grad[2, 2] = math.nan
    assert count_nonzero(buffers.flat("main_grad"), buffers.device).item() == 2
    assert count_nonzero([], buffers.device).item() == 0
