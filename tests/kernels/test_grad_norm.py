"""Gradient statistics against float64 PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import ConfigError, ShapeError
from redline.kernels.common import use_triton
from redline.kernels.grad_norm import bench, grad_statistics, supports

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.sampled_from((0, 1, 3, 64, 1009, 4096, 5001)), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    bad=st.integers(0, 3),
    zeros=st.integers(0, 3),
)
def test_statistics_match_float64(device, sizes, dtype, bad, zeros):
    """Several buffers, some empty; the counts are exact, the sum within the rounding of float64."""
    gen = torch.Generator().manual_seed(sum(sizes) + bad)
    grads = [torch.randn(size, generator=gen).to(dtype) for size in sizes]
    for grad in grads:
        grad[grad.numel() - min(zeros, grad.numel()) :] = 0.0
    expected_zeros = sum(int((grad == 0).sum()) for grad in grads)
    expected = sum(float((grad.double() ** 2).sum()) for grad in grads)
    poisoned = max(range(len(sizes)), key=sizes.__getitem__)
    bad = min(bad, sizes[poisoned])
    for i, value in zip(range(bad), (float("nan"), float("inf"), -float("inf")), strict=False):
        expected_zeros -= int(grads[poisoned][i] == 0)
        grads[poisoned][i] = value
    grads = [grad.to(device) for grad in grads]
    assert use_triton("grad_norm", "auto", supports(grads))
    for impl in ("triton", "reference"):
        squares, nonfinite, nonzero = grad_statistics(grads, impl=impl).tolist()
        assert nonfinite == bad
        assert nonzero == sum(sizes) - expected_zeros
        if bad:
            assert not torch.tensor(squares).isfinite()
        else:
            assert squares == pytest.approx(expected, rel=1e-13, abs=0)


def test_several_pieces_and_a_ragged_end(device, monkeypatch):
    """Pieces of 4,096 elements: the interpreter sees eleven of them, the last one short."""
    from redline.kernels.grad_norm import kernel

    monkeypatch.setattr(kernel, "PIECE_BYTES", 4 * 4096)
    grad = torch.randn(41_003, generator=torch.Generator().manual_seed(1)).to(device)
    squares, _, nonzero = grad_statistics([grad[:17], grad[17:]]).tolist()
    assert squares == pytest.approx(float((grad.double() ** 2).sum()), rel=1e-13)
    assert nonzero == 41_003


def test_large_gradients_do_not_overflow(device):
    """1e30 squared is no fp32 number; the norm of finite gradients is finite."""
    grad = torch.full((100,), 1e30, device=device)
    squares, nonfinite, _ = grad_statistics([grad]).tolist()
    assert squares**0.5 == pytest.approx(1e31, rel=1e-6)
    assert nonfinite == 0


def test_same_bits_every_run(device):
    grad = torch.randn(20_000, generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(grad_statistics([grad]), grad_statistics([grad]))


def test_what_is_wrong_is_loud(device):
    with pytest.raises(ShapeError, match="needs a gradient"):
        grad_statistics([])
    with pytest.raises(ShapeError, match="contiguous"):
        grad_statistics([torch.zeros(8, device=device)[::2]])
    with pytest.raises(ConfigError, match="float64"):
        grad_statistics([torch.zeros(8, device=device, dtype=torch.float64)], impl="triton")


def test_compiles_without_a_graph_break(device):
    grads = [torch.randn(300, device=device), torch.randn(70, device=device)]
    traced = torch.compile(lambda: grad_statistics(grads), backend="aot_eager", fullgraph=True)()
    assert torch.equal(traced, grad_statistics(grads))


def test_bench_case_times_equal_things(device, monkeypatch):
    monkeypatch.setattr(bench, "SIZE", 500)
    for dtype in (torch.float32, torch.bfloat16):
        case = bench._case(dtype)
        inputs = case.make_inputs(torch.device(device), dtype)
        fused, eager, norm = (case.providers[name]()(*inputs) for name in ("fused", "eager", "torch"))
        torch.testing.assert_close(fused, eager, rtol=1e-12, atol=0)
        torch.testing.assert_close(fused[0].sqrt().float(), norm.float(), rtol=1e-5, atol=0)
