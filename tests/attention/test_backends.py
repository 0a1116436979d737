"""Every backend against attention written out in float64, forward and backward.

Tolerances: an output is an average of values, so its error is a few units of the dtype's rounding (eps:
2^-8 for bf16, 2^-11 for fp16, 2^-24 for fp32), relative to the largest output; a gradient sums over up to S
keys and N/G heads of such terms, and a half-precision kernel rounds probabilities and their gradients once
each.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.attention import BACKENDS, MaskSpec, Request, flash_attention, unfused_attention
from redline.errors import ShapeError

UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = list(UNIT)
HEAD_DIMS = [40, 64, 72, 96, 128, 160, 192, 256]  # B021, and B028's 72
ATOL_UNITS = 8


def make_qkv(
    S: int, B: int, N: int, G: int, D: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    qkv_SBX = torch.randn(S, B, (N + 2 * G) * D, generator=generator, dtype=torch.float64)
    return qkv_SBX.to(device=device, dtype=dtype)


def split(qkv_SBX: Tensor, N: int, G: int, D: int) -> list[Tensor]:
    return [part.unflatten(-1, (-1, D)) for part in qkv_SBX.split((N * D, G * D, G * D), dim=-1)]


def reference(qkv_SBX: Tensor, N: int, G: int, D: int, mask: MaskSpec, scale: float) -> Tensor:
    """Attention as its definition reads, head by head."""
    q, k, v = split(qkv_SBX, N, G, D)
    S, B = q.shape[:2]
    rows = []
    for b in range(B):
        for n in range(N):
            group = n // (N // G)
            scores = q[:, b, n] @ k[:, b, group].T * scale
            visible = torch.ones(S, S, dtype=torch.bool, device=q.device)
            if mask.causal:
                visible = visible.tril()
            if mask.segment_ids_BS is not None:
                ids = mask.segment_ids_BS[b]
                visible = visible & (ids[:, None] == ids[None]) & (ids[:, None] >= 0)
            weights = torch.where(visible, (scores - scores.max()).exp(), 0.0)
            total = weights.sum(-1, keepdim=True)
            rows.append(torch.where(total > 0, weights / total.clamp_min(1e-300), 0.0) @ v[:, b, group])
    return torch.stack(rows).unflatten(0, (B, N)).permute(2, 0, 1, 3)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def check(
    name: str, S: int, B: int, N: int, G: int, D: int, dtype: torch.dtype, device: str, mask: MaskSpec
) -> None:
    qkv = make_qkv(S, B, N, G, D, dtype, device).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    scale = 1.3 * D**-0.5  # not the default, so that a backend which ignores it fails
    out = backend(name, D, dtype, device, N, G)(*split(qkv, N, G, D), mask, softmax_scale=scale)
    want = reference(exact, N, G, D, mask, scale)
    assert out.shape == want.shape and out.dtype == dtype
    grad = make_qkv(S, B, N, 0, D, dtype, device, seed=1).unflatten(-1, (N, D))
    out.backward(grad)
    want.backward(grad.double())
    # fp32 and fp64 sum in their own dtype: the error of a sum of S terms grows with its root
    tolerance = (ATOL_UNITS + (S**0.5 if dtype.itemsize >= 4 else 0)) * UNIT[dtype]
    assert relative_error(out, want) < tolerance
    assert relative_error(qkv.grad, exact.grad) < tolerance


def request_of(D: int, dtype: torch.dtype, device: str, N: int = 4, G: int = 2, **asked) -> Request:
    return Request(device_type=device, dtype=dtype, head_dim=D, num_heads=N, num_groups=G, **asked)


def backend(name: str, D: int, dtype: torch.dtype, device: str, N: int = 4, G: int = 2, **asked):
    return BACKENDS[name].make(request_of(D, dtype, device, N, G, **asked))


def refusal(name: str, request: Request) -> str | None:
    if name == "local" and request.device_type == "cpu":
        return "interpreted on a CPU: test_local.py"
    return BACKENDS[name].supports(request)


def runnable(name: str, D: int, dtype: torch.dtype, device: str, N: int = 4, G: int = 2, **asked) -> None:
    if reason := refusal(name, request_of(D, dtype, device, N, G, **asked)):
        pytest.skip(reason)


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_backend_equals_float64(name, dtype, heads, causal, device):
    N, G = heads
    runnable(name, 16, dtype, device, N, G)
    for S in (1, 2, 17, 33):
        request = Request(
            device_type=device, dtype=dtype, head_dim=16, num_heads=N, num_groups=G, seq_length=S
        )
        if S == 1 and name == "fused":
            assert BACKENDS[name].supports(request).startswith("PyTorch refuses it: ")
        else:
            check(name, S, 2, N, G, 16, dtype, device, MaskSpec(causal))


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_sizes_at_odd_lengths(name, head_dim, device):
    """B021: garbage gradients at head_dim 160 and 192 and a length of 97."""
    for dtype in (torch.bfloat16, torch.float32):
        if refusal(name, request_of(head_dim, dtype, device, 2, 1)) is None:
            for S in (97, 113, 128) if device == "cpu" else (97, 113, 128, 203, 1023):
                check(name, S, 1, 2, 1, head_dim, dtype, device, MaskSpec())


@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    S=st.integers(1, 20), B=st.integers(1, 3), G=st.integers(1, 3), R=st.integers(1, 3), D=st.integers(1, 9)
)
def test_any_sizes_on_a_cpu(S, B, G, R, D):
    for name in ("unfused", "flash"):
        check(name, S, B, G * R, G, D, torch.float64, "cpu", MaskSpec())


@settings(max_examples=15, derandomize=True, deadline=None)
@given(ids=st.lists(st.integers(-1, 2), min_size=2, max_size=12), causal=st.booleans())
def test_segments_and_padding(ids, causal):
    """B023's kind: empty and padded stretches contribute nothing and give zeros, not NaN."""
    segment_ids = torch.tensor([ids, ids[::-1]])
    check("unfused", len(ids), 2, 4, 2, 4, torch.float64, "cpu", MaskSpec(causal, segment_ids))


def test_gradient_of_a_row_that_sees_nothing_is_zero():
    qkv = make_qkv(3, 1, 2, 2, 4, torch.float32, "cpu").requires_grad_()
    out = unfused_attention(
        *split(qkv, 2, 2, 4), MaskSpec(True, torch.tensor([[0, -1, 0]])), softmax_scale=1.0
    )
    out.sum().backward()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.isfinite(qkv.grad).all() and torch.equal(qkv.grad[1], torch.zeros_like(qkv.grad[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 16, 33, 64, 127, 128, 129, 1025])
def test_probabilities_of_any_key_length(dtype, length):
    """B013: a masked softmax was wrong below 128 keys. Rows sum to 1, masked entries are exactly 0.

    Channel 0 of the values is 1 everywhere (the sum), channel 1 only at the last key, channel 2 at the first.
    """
    q, k, _ = split(make_qkv(length, 1, 1, 1, 4, dtype, "cpu"), 1, 1, 4)
    v = torch.zeros_like(k)
    v[..., 0] = v[-1, ..., 1] = v[0, ..., 2] = 1
    out = unfused_attention(q, k, v, MaskSpec(), softmax_scale=0.5)[:, 0, 0].double()
    scores = q[:, 0, 0].double() @ k[:, 0, 0].double().T * 0.5
    want = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    # each probability is rounded by half a unit of its own size, so their sum is off by half a unit, then
    # rounded
    assert (out[:, 0] - 1).abs().max() <= UNIT[dtype]
    assert torch.equal(out[:-1, 1], torch.zeros(length - 1, dtype=torch.float64))
    # scores up to 8 are rounded to the dtype before the softmax: exp(8 units) - 1
    assert ((out[:, 2] - want[:, 0]).abs() <= 8 * UNIT[dtype] * want[:, 0]).all()
    assert abs(out[-1, 1] - want[-1, -1]) <= 8 * UNIT[dtype] * want[-1, -1]


@pytest.mark.parametrize("name", list(BACKENDS))
def test_neighbours_in_memory_stay_untouched(name, device):
    """B028: a head size that is no multiple of 32 wrote beyond its row. Here all lies among canaries."""
    S, B, N, G, D = 33, 2, 4, 2, 72
    dtype = torch.bfloat16
    runnable(name, D, dtype, device)
    width = (N + 2 * G) * D
    buffer = torch.full((S, B, width + 48), 7.0, dtype=dtype, device=device)
    inner = buffer[:, :, 24 : 24 + width]
    inner.copy_(make_qkv(S, B, N, G, D, dtype, device))
    before = inner.clone()
    leaf = buffer.requires_grad_()
    attention = backend(name, D, dtype, device)
    out = attention(*split(leaf[:, :, 24 : 24 + width], N, G, D), MaskSpec(), softmax_scale=0.1)
    out.backward(torch.ones_like(out))
    assert torch.equal(inner, before)
    for canary in (buffer[:, :, :24], buffer[:, :, 24 + width :]):
        assert torch.equal(canary, torch.full_like(canary, 7.0))
    assert leaf.grad[:, :, :24].abs().max() == leaf.grad[:, :, 24 + width :].abs().max() == 0


@pytest.mark.parametrize("name", ["flash", "fused", "local"])
def test_no_copy_before_attention(name, device):
    """The kernels read the strided views of the merged projection as they are."""
    runnable(name, 64, torch.bfloat16, device)
    qkv = make_qkv(128, 2, 4, 2, 64, torch.bfloat16, device)
    views = split(qkv, 4, 2, 64)
    mask, attention = MaskSpec(), backend(name, 64, torch.bfloat16, device)
    attention(*views, mask, softmax_scale=0.125)  # a kernel is compiled outside of what is looked at
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(*views, mask, softmax_scale=0.125)
    ran = {event.key for event in profile.key_averages()}
    assert not ran & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::repeat_interleave"}, ran


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash", "unfused", "local"])
def test_deterministic_mode_repeats_bitwise(name, device):
    """B026: a deterministic flag was accepted and dropped. (cuDNN's kernel is refused in this mode.)"""
    dtype = torch.bfloat16
    runnable(name, 64, dtype, device, deterministic=True)
    attention = backend(name, 64, dtype, device, deterministic=True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(20 if device == "cuda" else 3):
            qkv = make_qkv(257, 2, 4, 2, 64, dtype, device).requires_grad_()
            out = attention(*split(qkv, 4, 2, 64), MaskSpec(), softmax_scale=0.125)
            out.backward(torch.ones_like(out))
            results.append((out.detach(), qkv.grad))
    finally:
        torch.use_deterministic_algorithms(before)
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(grad, results[0][1])


class FixedDropout:
    """Keeps a given set of probabilities."""

    def __init__(self, keep_BNST: Tensor, probability: float) -> None:
        self.keep, self.probability = keep_BNST, probability

    def drop_attention(self, probs_BNST: Tensor) -> Tensor:
        return torch.where(self.keep, probs_BNST / (1 - self.probability), 0.0)


def test_dropout_falls_on_the_probability_of_its_head():
    """With one key kept a query and head, the output is its value times its probability / (1 - p)."""
    S, B, N, G, D = 5, 2, 4, 2, 4
    qkv = make_qkv(S, B, N, G, D, torch.float64, "cpu")
    q, k, v = split(qkv, N, G, D)
    chosen = torch.randint(0, S, (B, N, S), generator=torch.Generator().manual_seed(0))
    keep = torch.zeros(B, N, S, S, dtype=torch.bool).scatter(-1, chosen[..., None], True)
    mask = MaskSpec(causal=False)
    out = unfused_attention(q, k, v, mask, softmax_scale=1.0, dropout=FixedDropout(keep, 0.25))
    for b in range(B):
        for n in range(N):
            group = n // (N // G)
            probs = (q[:, b, n] @ k[:, b, group].T).softmax(-1)
            picked = chosen[b, n]
            want = probs[torch.arange(S), picked, None] / 0.75 * v[picked, b, group]
            torch.testing.assert_close(out[:, b, n], want)


@pytest.mark.parametrize("attention", [unfused_attention, flash_attention])
def test_shapes_that_do_not_belong_together_are_refused(attention):
    q, k = torch.zeros(4, 1, 3, 8), torch.zeros(4, 1, 2, 8)
    with pytest.raises(ShapeError, match="N a multiple of G"):
        attention(q, k, k, MaskSpec(), softmax_scale=1.0)
    with pytest.raises(ShapeError):
        attention(q[:3], k[:, :, :1], k[:, :, :1], MaskSpec(), softmax_scale=1.0)
