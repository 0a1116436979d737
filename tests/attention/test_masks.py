"""What a MaskSpec means, against attention document by document and score by score in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.attention import MaskSpec, unfused_attention
from redline.errors import ShapeError


def heads(S: int, N: int, G: int, D: int, B: int = 1, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(S, B, n, D, generator=generator, dtype=torch.float64) for n in (N, G, G)]


def padded(lengths: list[int], size: int) -> torch.Tensor:
    """cu_seqlens of a fixed size, its last entries repeating the total."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat((ends, ends[-1:].expand(size - len(ends)))).int()


def plain(q, k, v, scale, left=-1, right=-1, softcap=0.0, sink=None):
    """One document [S, N, D], score by score."""
    S, N = q.shape[:2]
    out = torch.zeros_like(q)
    for n in range(N):
        group = n // (N // k.shape[1])
        for i in range(S):
            first = 0 if left < 0 else max(0, i - left)
            last = S if right < 0 else min(S, i + right + 1)
            scores = k[first:last, group] @ q[i, n] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0.0 if sink is None else sink[n].exp())
            out[i, n] = weights @ v[first:last, group] / total
    return out


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum),
    spare=st.integers(0, 3),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(-1, 3), st.integers(-1, 3))),
)
def test_packed_documents_are_as_alone(lengths, spare, causal, window):
    """B023's kind: empty documents, documents of one token, any of them with a window."""
    S = sum(lengths)
    q, k, v = heads(S, 4, 2, 4)
    mask = MaskSpec(
        causal, window=window, cu_seqlens=padded(lengths, len(lengths) + 1 + spare), max_seqlen=max(lengths)
    )
    out = unfused_attention(q, k, v, mask, softmax_scale=0.7)
    left, right = mask.limits
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        want = plain(q[part, 0], k[part, 0], v[part, 0], 0.7, left, right)
        torch.testing.assert_close(out[part, 0], want)
        first += length


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 0.8])
@pytest.mark.parametrize("with_sink", [True, False])
def test_caps_and_sinks(causal, softcap, with_sink):
    q, k, v = heads(9, 4, 2, 4)
    sink = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=torch.float64) if with_sink else None
    mask = MaskSpec(causal, window=(3, 1))
    out = unfused_attention(q, k, v, mask, softmax_scale=0.9, softcap=softcap, sink_N=sink)
    want = plain(q[:, 0], k[:, 0], v[:, 0], 0.9, *mask.limits, softcap, sink)
    torch.testing.assert_close(out[:, 0], want)


def test_tokens_after_the_last_document_see_nothing():
    q, k, v = (part.requires_grad_() for part in heads(6, 2, 2, 4))
    out = unfused_attention(q, k, v, MaskSpec(cu_seqlens=padded([3, 1], 4), max_seqlen=3), softmax_scale=1.0)
    out.sum().backward()
    assert out[4:].abs().max() == 0 and out[:4].abs().max() > 0
    for part in (q, k, v):
        assert torch.isfinite(part.grad).all() and part.grad[4:].abs().max() == 0


@pytest.mark.parametrize(
    ("rows", "mask"),
    [
        (2, {"cu_seqlens": padded([4], 2), "max_seqlen": 4}),
        (1, {"cu_seqlens": padded([4], 2)}),
        (1, {"cu_seqlens": padded([4], 2), "max_seqlen": 4, "segment_ids_BS": torch.zeros(1, 4).int()}),
        (1, {"window": (-2, 0)}),
    ],
)
def test_masks_that_mean_nothing_are_refused(rows, mask):
    with pytest.raises(ShapeError):
        unfused_attention(*heads(4, 2, 2, 4, B=rows), MaskSpec(**mask), softmax_scale=1.0)
