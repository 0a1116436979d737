"""Scale + mask + softmax against float64: causal, arbitrary mask, padding, all together, nothing left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse, assert_same, gradients
from wide import ROWS, some

from redline.errors import ConfigError, ShapeError
from redline.kernels.masked_softmax import masked_softmax, supports
from redline.kernels.masked_softmax.reference import masked_positions, masked_softmax_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _unfused(scores, scale, masked):
    """The plain path, in the dtype of the scores."""
    scaled = scores * scale
    if masked is not None:
        scaled = scaled.masked_fill(masked, -10000.0)
    y = torch.softmax(scaled, dim=-1)
    return y if masked is None else y.masked_fill(masked, 0.0)


def _exact(scores, scale, masked):
    """An independent formula in float64: exp over the sum of what is left."""
    weight = torch.exp(scores * scale)
    weight = weight if masked is None else weight * ~masked
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total == 0, 1.0, total)


def _check(device, dtype, shape, scale, causal, mask, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores, dy = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    masked = masked_positions(scores, causal, mask, lengths)
    fused = gradients(
        lambda x: masked_softmax(x, scale, causal=causal, mask=mask, lengths_B=lengths, impl="triton"),
        [scores], [dy],
    )  # fmt: skip
    plain = gradients(lambda x: _unfused(x, scale, masked), [scores], [dy])
    exact = gradients(lambda x: _exact(x, scale, masked), [scores.double()], [dy.double()])
    assert_no_worse(fused[0], plain[0], exact[0], "y")
    # dx = y (dy - sum): a difference, whose terms may be far larger than itself; it is judged at their size.
    size = scale * (exact[0] * dy.double()).abs().norm().item()
    error = (fused[1].double() - exact[1]).norm().item()
    limit = 1.1 * (plain[1].double() - exact[1]).norm().item()
    assert error <= max(limit, 2 * torch.finfo(dtype).eps * size)
    if masked is not None:
        assert (fused[0].masked_select(masked.expand(shape)) == 0).all()
        assert (fused[1].masked_select(masked.expand(shape)) == 0).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 3), N=st.integers(1, 3), S=st.integers(1, 20), K=st.integers(1, 70),
    causal=st.booleans(), how=st.sampled_from(["none", "full", "broadcast", "key"]), padded=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_any_mask(device, B, N, S, K, causal, how, padded, dtype):
    K = max(K, S) if causal else K
    generator = torch.Generator().manual_seed(K)
    shapes = {"full": (B, N, S, K), "broadcast": (B, 1, S, K), "key": (K,)}
    mask = None if how == "none" else (torch.rand(shapes[how], generator=generator) < 0.4).to(device)
    lengths = torch.randint(0, K + 1, (B,), generator=generator).to(device) if padded else None
    _check(device, dtype, (B, N, S, K), 0.7, causal, mask, lengths, seed=S)


@pytest.mark.parametrize("dtype", DTYPES)
@some
@given(
    S=ROWS, K=st.sampled_from((32768, 32749, 16385, 5003)) | st.integers(1025, 32768), causal=st.booleans(),
    masked=st.booleans(),
)  # fmt: skip
def test_rows_up_to_the_widest(device, S, K, causal, masked, dtype):
    mask = (torch.rand(K, generator=torch.Generator().manual_seed(K)) < 0.4).to(device) if masked else None
    _check(device, dtype, (1, 1, S, K), 0.7, causal, mask, None, seed=S)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 16, 33, 64, 127, 128, 129, 2049, 4099])
def test_key_lengths_b013(device, length, dtype):
    """B013: short and odd key lengths: rows sum to 1, masked entries are 0, all equals the fp32 softmax."""
    generator = torch.Generator().manual_seed(length)
    scores = (3 * torch.randn(1, 2, 3, length, generator=generator)).to(device, dtype)
    mask = (torch.rand(1, 1, 3, length, generator=generator) < 0.3).to(device)
    mask[..., 0] = False
    y = masked_softmax(scores, 0.5, mask=mask, impl="triton")
    assert (y.masked_select(mask.expand(y.shape)) == 0).all()
    # each of n weights is rounded by at most half a step of bf16 relative to itself: the sum by 2^-9
    torch.testing.assert_close(y.float().sum(-1), torch.ones(1, 2, 3, device=device), rtol=0, atol=2e-3)
    fp32 = torch.softmax((scores.float() * 0.5).masked_fill(mask, float("-inf")), dim=-1)
    torch.testing.assert_close(y.float(), fp32, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_rows_with_nothing_left_are_zero(device):
    scores = torch.randn(2, 1, 3, 5, device=device, requires_grad=True)
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.bool, device=device)
    mask[0, 0, 1] = True
    lengths = torch.tensor([5, 0], device=device)
    for impl in ("triton", "reference"):
        y = masked_softmax(scores, 1.0, mask=mask, lengths_B=lengths, impl=impl)
        (dx,) = torch.autograd.grad(y, scores, torch.randn_like(y))
        assert (y[0, 0, 1] == 0).all()
        assert (y[1] == 0).all()
        assert (dx[0, 0, 1] == 0).all()
        assert (dx[1] == 0).all()
        torch.testing.assert_close(y[0, 0, [0, 2]].sum(-1), torch.ones(2, device=device))


def test_large_scores_do_not_overflow(device):
    scores = torch.tensor([60000.0, -60000.0, 59000.0], device=device).view(1, 1, 1, 3).half()
    y = masked_softmax(scores, 1.0, impl="triton")
    assert y.flatten().tolist() == [1.0, 0.0, 0.0]


def test_strided_scores_and_gradient_b015(device):
    """B015: transposed, sliced and expanded scores give what contiguous copies give."""
    base = torch.randn(2, 8, 3, 20, device=device)
    dy = torch.randn(3, 2, 8, 10, device=device).permute(1, 0, 2, 3)
    x = base.transpose(1, 2)[..., ::2]
    results = []
    for leaf in (x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()):
        y = masked_softmax(leaf, 0.3, causal=True, impl="triton")
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    for strided, copied in zip(*results, strict=True):
        assert_same(strided, copied)
    expanded = base[:1, :1, :1].expand(2, 2, 2, 20)
    assert_same(masked_softmax(expanded, impl="triton"), masked_softmax(expanded.contiguous(), impl="triton"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_run(device, dtype):
    generator = torch.Generator().manual_seed(0)
    scores, dy = (torch.randn(2, 3, 9, 130, generator=generator).to(device, dtype) for _ in range(2))
    mask, lengths = (dy > 0.5)[:, :1], torch.tensor([130, 77], device=device)

    def run(x):
        return masked_softmax(x, 0.5, causal=True, mask=mask, lengths_B=lengths, impl="triton")

    first, second = (gradients(run, [scores], [dy]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiles_without_graph_break(device):
    scores, dy = torch.randn(1, 2, 4, 6, device=device), torch.randn(1, 2, 4, 6, device=device)
    mask, lengths = torch.rand(1, 1, 4, 6, device=device) < 0.3, torch.tensor([5], device=device)

    def block(scores):
        return masked_softmax(scores * 2, 0.5, causal=True, mask=mask, lengths_B=lengths, impl="triton")

    results = []
    for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaf = scores.clone().requires_grad_()
        y = fn(leaf)
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_empty_and_refusals(device):
    scores = torch.empty(0, 2, 3, 4, device=device, requires_grad=True)
    masked_softmax(scores, impl="triton").sum().backward()
    assert scores.grad.shape == scores.shape
    scores = torch.zeros(1, 2, 3, 4, device=device)
    for wrong in (
        lambda: masked_softmax(scores[0]),
        lambda: masked_softmax(scores, mask=torch.zeros(3, 3, dtype=torch.bool, device=device)),
        lambda: masked_softmax(scores, mask=torch.zeros(3, 4, device=device)),
        lambda: masked_softmax(scores, lengths_B=torch.zeros(2, dtype=torch.int64, device=device)),
    ):
        with pytest.raises(ShapeError):
            wrong()
    long = torch.zeros(1, 1, 1, 40000, device=device)
    assert "40000" in supports(long)
    with pytest.raises(ConfigError, match="40000"):
        masked_softmax(long, impl="triton")
    torch.testing.assert_close(masked_softmax(long), torch.full_like(long, 1 / 40000))
    torch.testing.assert_close(
        masked_softmax(scores.double(), 2.0), masked_softmax_reference(scores.double(), 2.0)
    )
