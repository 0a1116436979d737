"""Redline's own attention against float64, forward and backward, on a GPU or under Triton's interpreter.

The measure is the house's: the error may be a tenth above that of the plain twin (unfused) in the same dtype.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse
from mended_interpreter import DEVICE, mend

from redline.attention import MaskSpec, local_attention, unfused_attention
from redline.attention.local import backward, forward, variant_of
from redline.attention.local.config import INTERPRETER, Launch, launch_of, section
from redline.model.random import ATTENTION, DropoutState, dropout_at, dropout_keys

SCALE = 0.31
WHAT = ("output", "dq, dk and dv", "dsink")


@pytest.fixture(autouse=True)
def _interpreter(kernel_device):
    """Every test here runs kernels."""


def results(attention, dtype, S, B, N, G, D, mask, *, sink=None, **options):
    """Output, gradient of the merged projection, gradient of the sinks; for the same numbers in any dtype."""
    generator = torch.Generator().manual_seed(S + D)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    # rounded to bf16 first, so that every dtype is given the same numbers
    qkv = draw(S, B, (N + 2 * G) * D).bfloat16().to(DEVICE, dtype).requires_grad_()
    grad = draw(S, B, N, D).bfloat16().to(DEVICE, dtype)
    if sink is not None:
        sink = sink.to(DEVICE, torch.promote_types(dtype, torch.float32)).requires_grad_()  # as in a model
    parts = (part.unflatten(-1, (-1, D)) for part in qkv.split((N * D, G * D, G * D), dim=-1))
    out = attention(*parts, mask, softmax_scale=SCALE, sink_N=sink, **options)
    out.backward(grad)
    found = [out.detach(), qkv.grad]
    return found if sink is None else [*found, sink.grad]


def check(S, B, N, G, D, mask, dtype=torch.float32, ulps=8.0, **options):
    exact = results(unfused_attention, torch.float64, S, B, N, G, D, mask, **options)
    plain = results(unfused_attention, dtype, S, B, N, G, D, mask, **options)
    local = results(local_attention, dtype, S, B, N, G, D, mask, **options)
    for what, *three in zip(WHAT, local, plain, exact, strict=False):
        if what == "dsink" and dtype.itemsize == 2:  # made of the output as it is kept: rounded to 16 bits
            error, size = (three[0] - three[2]).norm(), three[2].norm()
            assert error <= torch.finfo(dtype).eps * size, f"dsink: error {error:.3e} (size {size:.3e})"
        else:
            assert_no_worse(*three, what=what, ulps=ulps)


def ends(lengths, spare=1):
    last = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat((last, last[-1:].expand(spare))).int().to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "causal"), [(torch.float32, True), (torch.float16, False), (torch.bfloat16, True)]
)
def test_equals_float64(dtype, causal):
    check(45, 2, 4, 2, 16, MaskSpec(causal), dtype)


@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    S=st.integers(1, 50),
    G=st.integers(1, 2),
    R=st.integers(1, 3),
    D=st.integers(1, 24),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(-1, 20), st.integers(-1, 20))),
)
def test_any_sizes_and_windows(S, G, R, D, causal, window):
    check(S, 1, G * R, G, D, MaskSpec(causal, window=window))


@settings(max_examples=6, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(sum),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9))),
)
def test_packed_documents(lengths, causal, window):
    """B023: empty documents, documents of one token, and an end that is repeated."""
    mask = MaskSpec(causal, window=window, cu_seqlens=ends(lengths), max_seqlen=max(lengths))
    check(sum(lengths), 1, 2, 1, 16, mask)


def test_tokens_of_no_document_give_zeros():
    mask = MaskSpec(cu_seqlens=ends([20, 3]), max_seqlen=20)
    out, grad = results(local_attention, torch.float32, 40, 1, 2, 1, 16, mask)
    assert out[23:].abs().max() == 0 and grad[23:].abs().max() == 0
    check(40, 1, 2, 1, 16, mask)


def test_segments_that_do_not_lie_together():
    segments = torch.tensor([[0] * 20 + [1] * 15, [0, -1, 1, 1, 0] * 7], device=DEVICE)
    check(35, 2, 2, 1, 16, MaskSpec(segment_ids_BS=segments))


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_caps_and_sinks(softcap):
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    # dsink sums S terms of either sign whose own size sets the error, not that of the sum
    check(40, 2, 4, 2, 16, MaskSpec(), softcap=softcap, sink=sink, ulps=64.0)


@pytest.mark.parametrize("S", [36, 37])
def test_dropout_draws_the_masks_of_the_plain_twin(S):
    """The mask is a function of the place in the sample, whatever tiles it is computed in."""
    state = DropoutState(
        keys=dropout_keys(7, 2, DEVICE),
        iteration=torch.tensor(3, device=DEVICE),
        sample_index_B=torch.tensor([11, 4], device=DEVICE),
        first_head=2,
    )
    dropout = dropout_at(state.layer(1), ATTENTION, 0.3)
    check(S, 2, 4, 2, 16, MaskSpec(), dropout=dropout)


def test_the_log_sum_exp_joins_two_halves_of_the_keys():
    """What attention over several ranks does: keys apart, outputs merged by their log-sum-exp."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(40, 1, 2, 16, generator=generator).to(DEVICE) for _ in range(4))
    variant = variant_of(MaskSpec(causal=False), SCALE)
    out, lse = forward(q, k, v, *variant)
    parts = [forward(q, k[part], v[part], *variant) for part in (slice(0, 23), slice(23, 40))]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(merged, lse)
    share = [torch.exp(part[1] - merged).permute(2, 0, 1)[..., None] for part in parts]
    torch.testing.assert_close(sum(s * part[0] for s, part in zip(share, parts, strict=True)), out)
    dq, dk, dv, _ = backward(do, q, k, v, out, lse, *variant)
    halves = [backward(do, q, k[part], v[part], out, lse, *variant) for part in (slice(0, 23), slice(23, 40))]
    torch.testing.assert_close(halves[0][0] + halves[1][0], dq)
    torch.testing.assert_close(torch.cat([half[1] for half in halves]), dk)
    torch.testing.assert_close(torch.cat([half[2] for half in halves]), dv)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU that has descriptors uses them in the other tests")
@pytest.mark.parametrize("packed", [True, False])
def test_tiles_fetched_by_descriptors(packed, monkeypatch):
    """The path of Hopper: zeros beyond the last row, and what it reads of the next head, are masked."""
    head_dim = 12 if packed else 16  # 12 channels in a tile of 16: the edge in that dimension too
    plain = launch_of(head_dim, 4, INTERPRETER)
    fetching = Launch(*(replace(each, tma=True) for each in (plain.forward, plain.dq, plain.dkv)), 16)
    monkeypatch.setattr("redline.attention.local.launch.launch_of", lambda *_: fetching)
    mask = MaskSpec(cu_seqlens=ends([5, 0, 30, 10]), max_seqlen=30) if packed else MaskSpec()
    check(45, 1 if packed else 2, 4, 2, head_dim, mask)


def test_a_query_without_keys_has_no_log_sum_exp():
    q = torch.ones(4, 1, 1, 16, device=DEVICE)
    segments = torch.tensor([[0, 0, -1, -1]], device=DEVICE)
    out, lse = forward(q, q, q, *variant_of(MaskSpec(segment_ids_BS=segments), SCALE))
    assert torch.isneginf(lse[0, 0, 2:]).all() and torch.isfinite(lse[0, 0, :2]).all()
    assert out[2:].abs().max() == 0


def test_empty_input():
    q = torch.zeros(0, 1, 2, 16, device=DEVICE, requires_grad=True)
    out = local_attention(q, q, q, MaskSpec(), softmax_scale=1.0)
    out.sum().backward()
    assert out.shape == q.grad.shape == (0, 1, 2, 16)


def test_the_same_bits_every_time():
    """B026, and by design: nothing is added in an order that varies."""
    times = 20 if DEVICE == "cuda" else 2
    runs = [results(local_attention, torch.float16, 60, 1, 4, 2, 16, MaskSpec()) for _ in range(times)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_neighbours_in_memory_stay_untouched():
    """B028: what lies around an input is neither read into the result nor written."""
    S, B, N, G, D = 21, 2, 2, 1, 12
    width = (N + 2 * G) * D
    buffer = torch.full((S, B, width + 8), float("nan"), device=DEVICE)
    buffer[:, :, 4 : 4 + width] = torch.randn(S, B, width, generator=torch.Generator().manual_seed(0))
    leaf = buffer.clone().requires_grad_()
    inner = leaf[:, :, 4 : 4 + width]
    parts = (part.unflatten(-1, (-1, D)) for part in inner.split((N * D, G * D, G * D), dim=-1))
    out = local_attention(*parts, MaskSpec(), softmax_scale=SCALE)
    out.backward(torch.ones_like(out))
    assert torch.isfinite(out).all() and torch.isfinite(leaf.grad).all()
    assert torch.equal(leaf.detach().isnan(), buffer.isnan())


def test_compiles_without_a_break():
    """torch.compile sees two opaque operators, and the same result."""
    mend()
    q = torch.randn(20, 1, 2, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def step(q, k, v):
        return local_attention(q, k, v, MaskSpec(), softmax_scale=SCALE).square().sum()

    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [q.clone().requires_grad_() for _ in range(3)]
        run(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("heads", [(32, 4), (6, 1), (7, 7), (48, 6)])
def test_sections_divide_the_heads_and_hold_whole_groups(heads):
    count, repeat = heads
    for size in (1, 1 << 20, 10 << 20, 1 << 30):
        found = section(count, repeat, size)
        assert count % found == 0 and found % repeat == 0


def test_launch_choices_of_the_interpreter():
    assert launch_of(80, 4, INTERPRETER).block_dim == 128 and launch_of(3, 4, INTERPRETER).block_dim == 16


ON_GPU = pytest.mark.skipif(DEVICE != "cuda", reason="large shapes need a GPU")


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("length", [1, 97, 113, 128, 203, 1023, 2048])
def test_head_sizes_and_lengths(head_dim, length):
    """B021's grid, causal GQA."""
    check(length, 2, 4, 2, head_dim, MaskSpec(), torch.bfloat16)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},
        {"window": (300, 50)},
        {"cu_seqlens": [1, 0, 700, 3, 2, 900, 0, 128, 314], "max_seqlen": 900},
        {"cu_seqlens": [1000, 1048], "max_seqlen": 1048, "window": (64, 64)},
    ],
    ids=["narrow", "wide", "skewed", "both"],
)
def test_masks_at_full_tiles(head_dim, causal, options):
    if "cu_seqlens" in options:
        options = {**options, "cu_seqlens": ends(options["cu_seqlens"], 3)}
    check(2048, 1, 4, 1, head_dim, MaskSpec(causal, **options), torch.bfloat16)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("head_dim", [64, 128])
def test_extras_at_full_tiles(head_dim):
    state = DropoutState(
        keys=dropout_keys(7, 2, DEVICE),
        iteration=torch.tensor(3, device=DEVICE),
        sample_index_B=torch.tensor([11, 4], device=DEVICE),
    )
    dropout = dropout_at(state.layer(1), ATTENTION, 0.6)  # a threshold above 2^31
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    segments = (torch.arange(1025, device=DEVICE) // 300).expand(2, -1)
    check(1025, 2, 4, 2, head_dim, MaskSpec(), torch.bfloat16, dropout=dropout)
    check(1028, 2, 4, 2, head_dim, MaskSpec(), torch.bfloat16, dropout=dropout)
    check(1025, 2, 4, 2, head_dim, MaskSpec(), torch.bfloat16, softcap=0.7)
    check(1025, 2, 4, 2, head_dim, MaskSpec(), torch.bfloat16, sink=sink)
    check(1025, 2, 4, 2, head_dim, MaskSpec(segment_ids_BS=segments), torch.bfloat16)


@pytest.mark.gpu
@ON_GPU
def test_more_elements_than_31_bits_count():
    """q holds 2^31 + elements: the last head of the last row is computed like the first."""
    S, N, D = 1 << 15, 513, 128
    q = torch.randn(S, 1, N, D, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(S, 1, 1, D, device=DEVICE, dtype=torch.bfloat16)
    mask = MaskSpec(window=(127, 0))
    with torch.no_grad():
        out = local_attention(q, k.expand(-1, -1, 1, -1), k, mask, softmax_scale=SCALE)
        tail = slice(S - 512, S)
        parts = (x[tail].float() for x in (q[:, :, -1:], k, k))  # in bf16 the plain scores are off by 0.1
        want = unfused_attention(*parts, mask, softmax_scale=SCALE)
    torch.testing.assert_close(out[S - 256 :, :, -1:].float(), want[256:], rtol=0.02, atol=0.02)
