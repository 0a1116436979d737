"""Bias + dropout + residual: the mask bit for bit against rng.py, values and gradients against float64."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse, gradients
from wide import COLUMNS, ROWS, some

from redline.errors import ConfigError, ShapeError
from redline.kernels.bias_dropout_add import DropoutKey, bias_dropout_add, kernel, supports
from redline.kernels.bias_dropout_add.reference import bias_dropout_add_reference, keep_mask
from redline.rng import HIDDEN_LANES, philox, stream_key

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _draw(device, B, positions=None, first_sample=5, iteration=11, site="mlp"):
    key = torch.tensor(stream_key(1234, "dropout", 3, site), device=device)
    samples = torch.arange(first_sample, first_sample + B, device=device)
    return DropoutKey(key, torch.tensor(iteration, device=device), samples, positions)


def _tensors(device, dtype, S, B, H, has_bias, residual_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual, dy = (torch.randn(S, B, H, generator=generator).to(device, dtype) for _ in range(3))
    bias = torch.randn(H, generator=generator).to(device, dtype) if has_bias else None
    return x, bias, residual.to(residual_dtype or dtype), dy.to(residual_dtype or dtype)


def _kernel_mask(draw, probability, S, B, H, device):
    """The mask as the kernel draws it, seen in its output."""
    x = torch.ones(S, B, H, device=device)
    return bias_dropout_add(x, None, torch.zeros_like(x), probability, draw, impl="triton") != 0


@pytest.mark.parametrize("H", [3, 8, 12, 17, 24])
def test_mask_is_rng_philox(device, H):
    """Element by element: lane e % 8 of block e // 8, the sample and the iteration in the counter."""
    S, B, probability, iteration = 3, 2, 0.37, 2**33 + 9
    positions = torch.tensor([0, 7, 2**36], device=device)  # the last is past 2^32 blocks
    samples = [2**32 + 6, 41]
    key = stream_key(1234, "dropout", 3, "mlp")
    draw = DropoutKey(
        torch.tensor(key, device=device), torch.tensor(iteration, device=device),
        torch.tensor(samples, device=device), positions,
    )  # fmt: skip
    mask = _kernel_mask(draw, probability, S, B, H, device)
    for s, position in enumerate(positions.tolist()):
        for b, sample in enumerate(samples):
            for h in range(H):
                element = position * H + h
                block = element // 8
                counter = (block & 0xFFFFFFFF, block >> 32, sample & 0xFFFFFFFF, iteration & 0xFFFFFFFF)
                lanes = struct.unpack("<8H", struct.pack("<4I", *philox(key, counter)))
                assert bool(mask[s, b, h]) == (lanes[element % 8] >= round(probability * 2**16))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(S=st.integers(1, 9), B=st.integers(1, 4), H=st.integers(1, 260), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_mask_of_kernel_and_reference_agree(device, S, B, H, p):
    draw = _draw(device, B)
    assert torch.equal(_kernel_mask(draw, p, S, B, H, device), keep_mask(draw, p, S, H))


@pytest.mark.parametrize("H", [20, 24])
def test_mask_does_not_depend_on_the_cut(device, H):
    """Sequence halves, single samples and any batch order draw what the whole draws."""
    S, B, p = 8, 3, 0.3
    whole = _kernel_mask(_draw(device, B), p, S, B, H, device)
    second_half = _draw(device, B, positions=torch.arange(4, 8, device=device))
    assert torch.equal(_kernel_mask(second_half, p, 4, B, H, device), whole[4:])
    last_sample = _draw(device, 1, first_sample=7)
    assert torch.equal(_kernel_mask(last_sample, p, S, 1, H, device), whole[:, 2:])
    for other in (_draw(device, B, iteration=12), _draw(device, B, site="attention")):
        assert not torch.equal(_kernel_mask(other, p, S, B, H, device), whole)


@pytest.mark.parametrize("p", [1e-9, 2**-16, 0.5, 1 - 1e-9])
def test_mask_at_the_ends_of_the_steps(device, p):
    """A probability between 0 and 1 is applied as neither; kernel and reference agree on values too."""
    S, B, H = 40, 2, 40
    x = torch.randn(S, B, H, device=device)
    fused, plain = (
        bias_dropout_add(x, None, torch.zeros_like(x), p, _draw(device, B), impl=impl)
        for impl in ("triton", "reference")
    )
    assert torch.equal(fused != 0, plain != 0)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=0)
    kept = plain[plain != 0]
    assert torch.allclose(kept, x[plain != 0] * HIDDEN_LANES.scale(p))


def _mask(p, iterations, H=1000):
    """[iterations, 5, 40, H] masks of the reference, which the kernel's are held to elsewhere."""
    draws = (_draw("cpu", 5, iteration=i) for i in range(iterations))
    return torch.stack([keep_mask(draw, p, 40, H).transpose(0, 1) for draw in draws])


@pytest.mark.parametrize("p", [0.1, 0.25, 2**-16 * 6])
def test_share_of_survivors(p):
    """Binomial: of a million draws, and in each of a block's 8 lanes, within 5 standard deviations of p."""
    mask = _mask(p, 5).flatten(0, 2)
    applied = HIDDEN_LANES.threshold(p) / 2**16
    for part in (mask, *(mask[:, lane::8] for lane in range(8))):
        dropped = 1 - part.double().mean().item()
        assert abs(dropped - applied) < 5 * (applied * (1 - applied) / part.numel()) ** 0.5


def test_neighbours_are_independent():
    """Both of two drop in p^2 of the cases: in a block, the next block, the next row, sample and step.

    The bound is 5 standard deviations, 1.21 times those of separate pairs where each is in two (at p = 0.3).
    """
    p = HIDDEN_LANES.threshold(0.3) / 2**16
    dropped = ~_mask(0.3, 5)
    pairs = [(dropped[..., a::8], dropped[..., b::8]) for a in range(8) for b in range(a)]
    pairs += [(dropped[..., :-8], dropped[..., 8:])]
    pairs += [(dropped.narrow(d, 0, n - 1), dropped.narrow(d, 1, n - 1)) for d, n in enumerate((5, 5, 40))]
    for first, second in pairs:
        both = (first & second).double().mean().item()
        assert abs(both - p * p) < 5 * 1.21 * (p * p * (1 - p * p) / first.numel()) ** 0.5


def _unfused(x, bias, residual, p, draw):
    x = x if bias is None else x + bias
    x = x.to(residual.dtype)
    if draw is not None:
        keep = keep_mask(draw, p, x.shape[0], x.shape[2])
        x = torch.where(keep, x * HIDDEN_LANES.scale(p), torch.zeros_like(x))
    return residual + x


def _check(device, S, B, H, dtype, has_bias, p, fp32_residual):
    x, bias, residual, dy = _tensors(
        device, dtype, S, B, H, has_bias, torch.float32 if fp32_residual else None, seed=H
    )
    draw = _draw(device, B) if p else None
    inputs = (x, bias, residual)
    fused = gradients(lambda *a: bias_dropout_add(*a, p, draw, impl="triton"), inputs, [dy])
    plain = gradients(lambda *a: _unfused(*a, p, draw), inputs, [dy])
    exact_inputs = [t if t is None else t.double() for t in inputs]
    exact = gradients(lambda *a: bias_dropout_add_reference(*a, p, draw), exact_inputs, [dy.double()])
    names = ("y", "dx", "dbias", "dresidual") if has_bias else ("y", "dx", "dresidual")
    for name, f, u, e in zip(names, fused, plain, exact, strict=True):
        assert_no_worse(f, u, e, f"{name} {dtype} {S}x{B}x{H} p={p}")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    S=st.integers(1, 12), B=st.integers(1, 3), H=st.integers(1, 300), dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(), p=st.sampled_from([0.0, 0.1, 0.5]), fp32_residual=st.booleans(),
)  # fmt: skip
def test_no_worse_than_unfused(device, S, B, H, dtype, has_bias, p, fp32_residual):
    _check(device, S, B, H, dtype, has_bias, p, fp32_residual)


@some
@given(
    S=ROWS, H=COLUMNS, dtype=st.sampled_from(DTYPES), has_bias=st.booleans(),
    p=st.sampled_from([0.0, 0.1]), fp32_residual=st.booleans(),
)  # fmt: skip
def test_any_width(device, S, H, dtype, has_bias, p, fp32_residual):
    _check(device, S, 1, H, dtype, has_bias, p, fp32_residual)


def test_wide_hidden(device):
    x, bias, residual, dy = _tensors(device, torch.bfloat16, 2, 1, 16384, True)
    draw = _draw(device, 1)
    fused = gradients(lambda *a: bias_dropout_add(*a, 0.1, draw, impl="triton"), (x, bias, residual), [dy])
    plain = gradients(lambda *a: bias_dropout_add_reference(*a, 0.1, draw), (x, bias, residual), [dy])
    # Both compute in fp32 and round once, so they may differ by one step of bf16 where the sums differ.
    for f, u in zip(fused, plain, strict=True):
        torch.testing.assert_close(f, u, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("H", [1024, 12])
@pytest.mark.parametrize("B", [1, 4])
def test_a_program_walks_over_many_rows(device, monkeypatch, H, B):
    """Backward keeps place of sample and position from tile to tile, here 3 programs for up to 12 tiles."""
    rows = 24 if H == 1024 else 1200
    monkeypatch.setattr(kernel, "num_sms", lambda index: 3)
    monkeypatch.setattr(kernel, "PROGRAMS_PER_SM", 1)
    positions = torch.randperm(rows // B, device=device) + 2**33
    draw = _draw(device, B, positions=positions)
    inputs = _tensors(device, torch.float32, rows // B, B, H, True)
    results = [
        gradients(lambda *a, i=impl: bias_dropout_add(*a, 0.4, draw, impl=i), inputs[:3], [inputs[3]])
        for impl in ("triton", "reference")
    ]
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=2e-5)  # fp32 sums of up to 1200


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_same_bits_every_run(device, dtype, p):
    """The bias's gradient too, a sum over more rows than one program takes."""
    x, bias, residual, dy = _tensors(device, dtype, 150, 2, 72, True)
    draw = _draw(device, 2)
    first, second = (
        gradients(lambda *a: bias_dropout_add(*a, p, draw, impl="triton"), (x, bias, residual), [dy])
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_strided_inputs_b015(device):
    """B015: a transposed batch, a column slice and expanded rows give what contiguous copies give."""
    draw = _draw(device, 3)
    base = torch.randn(3, 5, 48, device=device)
    x = base.transpose(0, 1)[..., :33]
    residual = base[0, 0, :33].expand(5, 3, 33)
    dy = torch.randn(5, 3, 70, device=device)[..., 1:67:2]
    results = []
    for make in (lambda t: t, lambda t: t.contiguous()):
        a, r = make(x).detach().requires_grad_(), make(residual).detach().requires_grad_()
        y = bias_dropout_add(a, None, r, 0.2, draw, impl="triton")
        results.append((y, *torch.autograd.grad(y, (a, r), make(dy))))
    assert all(torch.equal(s, c) for s, c in zip(*results, strict=True))


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_main_grad_with_two_forwards_in_flight(device, impl, p):
    x, bias, residual, dy = _tensors(device, torch.float32, 7, 2, 24, True)
    bias.requires_grad_()
    draws, main_grad = (
        [_draw(device, 2), _draw(device, 2, first_sample=90)],
        torch.full((24,), 1.5, device=device),
    )
    outputs = [bias_dropout_add(x, bias, residual, p, d, main_grad=main_grad, impl=impl) for d in draws]
    for y in outputs:
        y.backward(dy)
    assert bias.grad is None
    exact = bias.detach().double().requires_grad_()
    for d in draws:
        bias_dropout_add_reference(x.double(), exact, residual.double(), p, d).backward(dy.double())
    torch.testing.assert_close(main_grad.double(), exact.grad + 1.5, rtol=1e-5, atol=1e-5)  # fp32 sums of 28


def test_compiles_without_graph_break_and_without_recompiling(device):
    x, bias, residual, dy = _tensors(device, torch.float32, 4, 2, 16, True)
    draw = _draw(device, 2)

    def block(x, bias, residual, main_grad, iteration):
        now = DropoutKey(draw.key, iteration, draw.sample_index_B)
        return bias_dropout_add(x * 2, bias, residual, 0.3, now, main_grad=main_grad, impl="triton")

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        results = []
        for fn in (block, compiled):
            leaf, parameter, main_grad = x.clone().requires_grad_(), bias.clone().requires_grad_(), bias * 0
            y = fn(leaf, parameter, residual, main_grad, torch.tensor(step, device=device))
            y.backward(dy)
            results.append((y, leaf.grad, main_grad))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_nothing_is_kept_for_backward(device):
    """No activation and no mask is saved: only the bias and what the mask is a function of."""
    x, bias, residual, _ = _tensors(device, torch.bfloat16, 6, 2, 64, True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        bias_dropout_add(x.requires_grad_(), bias, residual, 0.1, _draw(device, 2), impl="triton")
    assert sum(saved) <= 64 + 2 + 1 + 2


def test_empty_and_refusals(device):
    x = torch.empty(0, 2, 8, device=device, requires_grad=True)
    bias = torch.ones(8, device=device, requires_grad=True)
    bias_dropout_add(x, bias, x.detach(), 0.1, _draw(device, 2), impl="triton").sum().backward()
    assert torch.equal(bias.grad, torch.zeros(8, device=device))
    x = torch.zeros(2, 2, 8, device=device)
    for wrong in (
        lambda: bias_dropout_add(x, None, x[:1]),
        lambda: bias_dropout_add(x, bias[:4], x),
        lambda: bias_dropout_add(x, None, x, 1.0, _draw(device, 2)),
        lambda: bias_dropout_add(x, None, x, 0.1, _draw(device, 3)),
        lambda: bias_dropout_add(x, None, x, 0.1, _draw(device, 2, positions=torch.zeros(2, device=device))),
    ):
        with pytest.raises(ShapeError):
            wrong()
    assert "float64" in supports(x.double(), None, x)
    with pytest.raises(ConfigError, match="float64"):
        bias_dropout_add(x.double(), None, x, impl="triton")
