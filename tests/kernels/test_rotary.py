"""Rotary embedding against complex multiplication in float64: GQA, partial, interleaved, packed, in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse, gradients

from redline.errors import ConfigError, ShapeError
from redline.kernels.common import split_qkv
from redline.kernels.rotary import rotary, rotary_qkv, supports
from redline.kernels.rotary.reference import rotary_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _table(device, P, rotary_dim, dtype=torch.float32):
    pair = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angle = torch.arange(P, dtype=torch.float64)[:, None] * 10000.0**-pair
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def _by_complex_numbers(x, rotary_dim, positions, interleaved):
    """An independent formula: pairs are complex numbers times exp(i angle), in float64."""
    half = rotary_dim // 2
    angle = positions.double()[..., None] * 10000.0 ** -(
        torch.arange(half, device=x.device).double() * 2 / rotary_dim
    )
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    turned, rest = x[..., :rotary_dim].double(), x[..., rotary_dim:].double()
    pairs = (
        turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    )
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    out = out if interleaved else out.transpose(-1, -2)
    return torch.cat((out.flatten(-2), rest), dim=-1)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    S=st.integers(1, 7), B=st.integers(1, 3), N=st.integers(1, 9), G=st.integers(1, 5),
    half_dim=st.integers(1, 40), share=st.sampled_from([1.0, 0.5, 0.25]), interleaved=st.booleans(),
    packed=st.booleans(), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_no_worse_than_unfused(device, S, B, N, G, half_dim, share, interleaved, packed, dtype):
    D, rotary_dim = 2 * half_dim, 2 * max(1, int(half_dim * share))
    generator = torch.Generator().manual_seed(S + 10 * D)
    q, k, dq, dk = (torch.randn(S, B, n, D, generator=generator).to(device, dtype) for n in (N, G, N, G))
    positions = torch.randint(0, 50, (B, S), generator=generator).to(device).t() if packed else None
    index = torch.arange(S, device=device)[:, None].expand(S, B) if positions is None else positions
    cos, sin = _table(device, 50, rotary_dim)

    def fused(q, k):
        return rotary(
            q,
            k,
            cos,
            sin,
            rotary_dim=rotary_dim,
            positions_SB=positions,
            interleaved=interleaved,
            impl="triton",
        )

    def unfused(q, k):
        low = cos.to(dtype), sin.to(dtype)  # the plain path takes the table in the tensor's dtype
        return tuple(rotary_reference(x, *low, positions, interleaved).to(dtype) for x in (q, k))

    def exact(q, k):
        return tuple(_by_complex_numbers(x, rotary_dim, index, interleaved) for x in (q, k))

    got, plain = gradients(fused, (q, k), [dq, dk]), gradients(unfused, (q, k), [dq, dk])
    want = gradients(exact, (q.double(), k.double()), [dq.double(), dk.double()])
    for name, f, u, e in zip(("q", "k", "dq", "dk"), got, plain, want, strict=True):
        assert_no_worse(f, u, e, name)


def _positions(placed, S, B, generator):
    """None for the index in the sequence; a place of each token; or two sequences packed into one, THD."""
    if placed == "index":
        return None
    if placed == "packed":
        return torch.cat([torch.arange(n) for n in (S // 2 + 1, S - S // 2 - 1)])[:, None]
    return torch.randint(0, 50, (B, S), generator=generator).t()


@pytest.mark.parametrize("placed", ["index", "positions", "packed"])
@settings(max_examples=7, deadline=None, derandomize=True)
@given(
    S=st.integers(1, 8), B=st.integers(1, 3), N=st.integers(1, 12), G=st.integers(1, 4),
    half_dim=st.integers(1, 64), full=st.booleans(), interleaved=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_merged_projection_in_place(device, S, B, N, G, half_dim, full, interleaved, placed, dtype):
    """q, k and v are views of the projection; their gradients become one gradient of it."""
    D, rotary_dim = 2 * half_dim, 2 * half_dim if full else 2 * ((half_dim + 1) // 2)
    B = 1 if placed == "packed" else B
    generator = torch.Generator().manual_seed(S + 10 * D)
    positions = _positions(placed, S, B, generator)
    positions = None if positions is None else positions.to(device)
    index = torch.arange(S, device=device)[:, None].expand(S, B) if positions is None else positions
    cos, sin = _table(device, 50, rotary_dim)
    qkv = torch.randn(S, B, (N + 2 * G) * D, generator=generator).to(device, dtype)
    grads = [
        torch.randn(B, n, S, D, generator=generator).to(device, dtype).permute(2, 0, 1, 3) for n in (N, G, G)
    ]
    sizes = {"num_heads": N, "num_groups": G, "head_dim": D, "rotary_dim": rotary_dim}

    def ours(leaf, impl):
        qkv = leaf * 1
        how = {"positions_SB": positions, "interleaved": interleaved, "impl": impl}
        out = rotary_qkv(qkv, cos, sin, **sizes, **how)
        if impl == "triton":
            base = qkv.untyped_storage().data_ptr()
            assert all(t.untyped_storage().data_ptr() == base for t in out)
        return out

    def unfused(qkv):
        low = cos.to(dtype), sin.to(dtype)  # the plain path takes the table in the tensor's dtype
        q, k, v = split_qkv(qkv, N, G, D)
        return *(rotary_reference(x, *low, positions, interleaved).to(dtype) for x in (q, k)), v * 1

    def exact(qkv):
        q, k, v = split_qkv(qkv, N, G, D)
        return *(_by_complex_numbers(x, rotary_dim, index, interleaved) for x in (q, k)), v * 1

    plain = gradients(unfused, [qkv], grads)
    want = gradients(exact, [qkv.double()], [grad.double() for grad in grads])
    for impl in ("triton", "reference"):
        got = gradients(lambda x, impl=impl: ours(x, impl), [qkv], grads)
        for name, f, u, e in zip(("q", "k", "v", "dqkv"), got, plain, want, strict=True):
            assert_no_worse(f, u, e, f"{name} {impl}")


@pytest.mark.parametrize(
    ("dtype", "interleaved"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_same_bits_every_run(device, dtype, interleaved):
    """In place and not, with packed positions."""
    S, B, N, G, D = 9, 2, 4, 2, 32
    generator = torch.Generator().manual_seed(0)
    cos, sin = _table(device, 50, D)
    positions = torch.randint(0, 50, (S, B), generator=generator).to(device)
    qkv = torch.randn(S, B, (N + 2 * G) * D, generator=generator).to(device, dtype)
    how = {"rotary_dim": D, "positions_SB": positions, "interleaved": interleaved, "impl": "triton"}

    def merged(qkv):
        return rotary_qkv(qkv * 1, cos, sin, num_heads=N, num_groups=G, head_dim=D, **how)

    def apart(qkv):
        return rotary(*split_qkv(qkv, N, G, D)[:2], cos, sin, **how)

    for fn in (merged, apart):
        grads = [x.detach() for x in fn(qkv)]
        first, second = (gradients(fn, [qkv], grads) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("dim", "heads", "groups", "blocks"),
    [
        (8, 32, 1, 3),
        (8, 4, 4, 2),
        (8, 5, 2, 2),
        (8, 1, 1, 2),
        (128, 16, 8, 3),
        (128, 12, 4, 3),
        (256, 8, 4, 3),
    ],
)
def test_q_and_k_are_turned_by_one_launch(device, monkeypatch, dim, heads, groups, blocks):
    """Forward and backward; where k has few heads, q's are taken 16 at a time, or what fills two warps."""
    kernel, launched = pytest.importorskip("redline.kernels.rotary.kernel"), []
    inner = kernel._rotary_kernel

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return inner[grid]

    monkeypatch.setattr(kernel, "_rotary_kernel", Counted())
    cos, sin = _table(device, 3, dim)
    q, k = (torch.randn(3, 2, n, dim, device=device) for n in (heads, groups))
    results = [
        gradients(lambda q, k, i=impl: rotary(q, k, cos, sin, rotary_dim=dim, impl=i), (q, k), [q, k])
        for impl in ("triton", "reference")
    ]
    assert launched == [(3 * 2 * blocks,)] * 2
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fraction", [0.5, 0.125])
def test_partial_rotary_b017(device, fraction):
    """B017: other channels pass unchanged; a table wider, narrower or shorter than needed raises."""
    D, S = 64, 5
    rotary_dim = int(D * fraction)
    q, k = torch.randn(S, 2, 4, D, device=device), torch.randn(S, 2, 2, D, device=device)
    cos, sin = _table(device, S, rotary_dim)
    q_out, k_out = rotary(q, k, cos, sin, rotary_dim=rotary_dim, impl="triton")
    assert torch.equal(q_out[..., rotary_dim:], q[..., rotary_dim:])
    assert torch.equal(k_out[..., rotary_dim:], k[..., rotary_dim:])
    index = torch.arange(S, device=device)[:, None].expand(S, 2)
    torch.testing.assert_close(
        q_out.double(), _by_complex_numbers(q, rotary_dim, index, False), rtol=1e-5, atol=1e-5
    )
    for wrong in (
        _table(device, S, 2 * rotary_dim),
        _table(device, S, rotary_dim // 2),
        _table(device, S - 1, rotary_dim),
    ):
        with pytest.raises(ShapeError):
            rotary(q, k, *wrong, rotary_dim=rotary_dim, impl="triton")
    with pytest.raises(ShapeError):
        rotary(q, k, *_table(device, S, 2 * D), rotary_dim=2 * D, impl="triton")


def test_position_outside_the_table_is_loud(device):
    cos, sin = _table(device, 4, 8)
    q = torch.ones(2, 1, 1, 8, device=device)
    positions = torch.tensor([[3], [4]], device=device)
    out, _ = rotary(q, q, cos, sin, rotary_dim=8, positions_SB=positions, impl="triton")
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()


def test_packed_positions_equal_separate_sequences(device):
    """THD: three sequences packed into one row give what each gives alone."""
    lengths, D = (3, 5, 2), 16
    cos, sin = _table(device, 8, D)
    q = torch.randn(10, 1, 3, D, device=device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)[:, None]
    packed, _ = rotary(q, q, cos, sin, rotary_dim=D, positions_SB=positions, impl="triton")
    alone = [rotary(part, part, cos, sin, rotary_dim=D, impl="triton")[0] for part in q.split(lengths)]
    assert torch.equal(packed, torch.cat(alone))


def test_strided_views_b015(device):
    """B015: heads inside a wider row, a transposed batch and a strided last dim equal contiguous copies."""
    cos, sin = _table(device, 6, 16)
    base = torch.randn(2, 6, 5, 40, device=device)
    q, k = base.transpose(0, 1)[..., 3:19], base[:, :, ::2, ::2].transpose(0, 1)[..., :16]
    strided = rotary(q, k, cos, sin, rotary_dim=16, impl="triton")
    copied = rotary(q.contiguous(), k.contiguous(), cos, sin, rotary_dim=16, impl="triton")
    assert all(torch.equal(a, b) for a, b in zip(strided, copied, strict=True))


def test_what_was_saved_before_is_guarded(device):
    """Turning in place what another operation saved for its backward raises: no wrong gradients."""
    leaf = torch.randn(2, 1, 24, device=device, requires_grad=True)
    cos, sin = _table(device, 2, 8)
    qkv = leaf.exp()  # saves its result
    q, _, _ = rotary_qkv(qkv, cos, sin, num_heads=1, num_groups=1, head_dim=8, rotary_dim=8, impl="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()
    base, sizes = torch.ones(2, 2, 48, device=device), {"num_heads": 1, "num_groups": 1, "head_dim": 8}
    for wrong in (leaf, base[..., ::2], base[..., :24], base[..., :24].contiguous().transpose(0, 1)):
        with pytest.raises(ShapeError, match="in place"):
            rotary_qkv(wrong, cos, sin, **sizes, rotary_dim=8, impl="triton")


def test_compiles_without_graph_break(device):
    cos, sin = _table(device, 3, 8)
    x, weight = torch.randn(3, 2, 6, device=device), torch.randn(6, 32, device=device)

    def block(x, weight):
        q, k, v = rotary_qkv(
            x @ weight, cos, sin, num_heads=2, num_groups=1, head_dim=8, rotary_dim=8, impl="triton"
        )
        q, k = rotary(q * 2, k, cos, sin, rotary_dim=8, interleaved=True, impl="triton")
        return q, k, v

    results = []
    for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = fn(*leaves)
        results.append([*out, *torch.autograd.grad([(t * t).sum() for t in out], leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_empty_and_refusals(device):
    cos, sin = _table(device, 4, 8)
    q = torch.empty(0, 2, 3, 8, device=device, requires_grad=True)
    out, _ = rotary(q, q[:, :, :1], cos, sin, rotary_dim=8, impl="triton")
    out.sum().backward()
    assert q.grad.shape == q.shape
    qkv = torch.empty(0, 2, 32, device=device, requires_grad=True)
    sizes = {"num_heads": 2, "num_groups": 1, "head_dim": 8, "rotary_dim": 8}
    sum(t.sum() for t in rotary_qkv(qkv * 1, cos, sin, **sizes, impl="triton")).backward()
    assert qkv.grad.shape == qkv.shape
    q = torch.zeros(2, 1, 1, 8, device=device)
    assert "fp32" in supports(q, cos.double(), cos) and "fp32" in supports(q, cos, cos.double())
    with pytest.raises(ConfigError, match="fp32"):
        rotary(q, q, cos.double(), sin.double(), rotary_dim=8, impl="triton")
    for wrong in (torch.zeros(2, device=device), torch.zeros(2, 1, dtype=torch.bool, device=device)):
        with pytest.raises(ShapeError, match="integers"):
            rotary(q, q, cos, sin, rotary_dim=8, positions_SB=wrong)
    assert split_qkv(torch.zeros(2, 1, 32), 2, 1, 8)[0].shape == (2, 1, 2, 8)
