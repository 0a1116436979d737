"""QK norm against float64: three kinds, GQA, odd head sizes, gradients as attention leaves them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse

from redline.errors import ConfigError, ShapeError
from redline.kernels.qk_norm import QKNormParams, qk_norm, supports
from redline.kernels.qk_norm.reference import qk_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ("rms", "layer", "l2")
VECTORS = ("q_weight", "k_weight", "q_bias", "k_bias")
EPS = 1e-5


def _vectors(kind, D, generator):
    names = {"l2": (), "rms": VECTORS[:2], "layer": VECTORS}[kind]
    return {name: 0.5 + torch.randn(D, generator=generator) for name in names}


def _unfused(qkv, params, N, G, D, kind, zero_centered):
    """PyTorch's own norms in the tensor's dtype, on views."""
    S, B, _ = qkv.shape
    q, k, v = qkv.view(S, B, N + 2 * G, D).split((N, G, G), dim=2)
    outputs = []
    for x, name in ((q, "q"), (k, "k")):
        weight, bias = params.get(f"{name}_weight"), params.get(f"{name}_bias")
        weight = weight + 1 if zero_centered and weight is not None else weight
        if kind == "layer":
            outputs.append(torch.nn.functional.layer_norm(x, (D,), weight, bias, EPS))
        else:
            outputs.append(torch.nn.functional.rms_norm(x, (D,), weight, EPS))
    return (*outputs, v)


def _run(fn, qkv, vectors, grads):
    """Outputs, the gradient of qkv and those of the vectors."""
    leaf = qkv.detach().clone().requires_grad_()
    params = {name: v.detach().clone().requires_grad_() for name, v in vectors.items()}
    out = fn(leaf, params)
    grads = [g.to(out[0].dtype) for g in grads]
    return [*out, *torch.autograd.grad(out, [leaf, *params.values()], grads)]


def _check(device, kind, dtype, S, B, N, G, D, zero_centered, batch_first):
    generator = torch.Generator().manual_seed(D)
    qkv = torch.randn(S, B, (N + 2 * G) * D, generator=generator).to(device, dtype)
    vectors = {name: v.to(device, dtype) for name, v in _vectors(kind, D, generator).items()}
    # gradients as attention leaves them: [B, heads, S, D] or [S, B, heads, D] in memory
    grads = [
        torch.randn(B, n, S, D, generator=generator).to(device, dtype).permute(2, 0, 1, 3) for n in (N, G, G)
    ]
    grads = grads if batch_first else [grad.contiguous() for grad in grads]

    def fused(qkv, p):
        sizes = {"num_heads": N, "num_groups": G, "head_dim": D}
        return qk_norm(
            qkv, QKNormParams(**p), **sizes, kind=kind, eps=EPS, zero_centered=zero_centered, impl="triton"
        )

    got = _run(fused, qkv, vectors, grads)
    plain = _run(lambda x, p: _unfused(x, p, N, G, D, kind, zero_centered), qkv, vectors, grads)
    exact = _run(
        lambda x, p: qk_norm_reference(x, QKNormParams(**p), N, G, D, kind, EPS, zero_centered),
        qkv.double(), {name: v.double() for name, v in vectors.items()}, [g.double() for g in grads],
    )  # fmt: skip
    names = ("q", "k", "v", "dqkv", *(f"d{name}" for name in vectors))
    for name, f, u, e in zip(names, got, plain, exact, strict=True):
        assert_no_worse(f, u, e, f"{name} {kind} {dtype}", ulps=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3, deadline=None, derandomize=True)  # on a GPU nearly every shape is compiled anew
@given(
    S=st.integers(1, 6), B=st.integers(1, 3), N=st.integers(1, 8), G=st.integers(1, 4), D=st.integers(7, 140),
    zero_centered=st.booleans(), batch_first=st.booleans(),
)  # fmt: skip
def test_no_worse_than_unfused(device, kind, dtype, S, B, N, G, D, zero_centered, batch_first):
    _check(device, kind, dtype, S, B, N, G, D, zero_centered, batch_first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    S=st.integers(1, 3), N=st.integers(1, 4), G=st.integers(1, 2), kind=st.sampled_from(KINDS),
    D=st.sampled_from((2048, 2047, 1023, 513)) | st.integers(141, 2048),
    zero_centered=st.booleans(), batch_first=st.booleans(),
)  # fmt: skip
def test_heads_up_to_the_widest(device, S, N, G, kind, D, dtype, zero_centered, batch_first):
    _check(device, kind, dtype, S, 1, N, G, D, zero_centered, batch_first)


def test_v_is_a_view_wherever_the_projection_lies(device):
    N, G, D = 2, 1, 8
    qkv = torch.randn(4, 3, (N + 2 * G) * D, device=device)[1:]  # not at the start of its storage
    v = qk_norm(qkv, QKNormParams(), num_heads=N, num_groups=G, head_dim=D, kind="l2", impl="triton")[2]
    assert v.data_ptr() == qkv[..., -D:].data_ptr() and torch.equal(v.flatten(2), qkv[..., -D:])


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_main_grads_with_two_forwards_in_flight(device, impl):
    N, G, D = 3, 2, 16
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 2, (N + 2 * G) * D, generator=generator).to(device)
    vectors = {n: v.to(device).requires_grad_() for n, v in _vectors("layer", D, generator).items()}
    main_grads = {f"{n}_main_grad": torch.full((D,), 2.0, device=device) for n in VECTORS}
    params = QKNormParams(**vectors, **main_grads)
    sizes = {"num_heads": N, "num_groups": G, "head_dim": D, "kind": "layer", "impl": impl}
    leaves = [(qkv * k).requires_grad_() for k in (1, 2)]
    outputs = [qk_norm(leaf, params, **sizes) for leaf in leaves]
    for out in outputs:
        sum((t * t).sum() for t in out[:2]).backward()
    assert all(v.grad is None for v in vectors.values())
    exact = {n: v.detach().double().requires_grad_() for n, v in vectors.items()}
    for k in (1, 2):
        out = qk_norm_reference(qkv.double() * k, QKNormParams(**exact), N, G, D, "layer")
        sum((t * t).sum() for t in out[:2]).backward()
    for name in VECTORS:  # fp32 sums of up to 60 products
        got = main_grads[f"{name}_main_grad"].double()
        torch.testing.assert_close(got, exact[name].grad + 2.0, rtol=2e-5, atol=2e-5)


def test_compiles_without_graph_break(device):
    N, G, D = 2, 1, 8
    x, projection = torch.randn(3, 2, 6, device=device), torch.randn(6, (N + 2 * G) * D, device=device)
    weight = torch.rand(2, D, device=device)

    def block(x, q_weight, k_weight, main_grad):
        params = QKNormParams(q_weight=q_weight, k_weight=k_weight, q_weight_main_grad=main_grad)
        return qk_norm(x @ projection, params, num_heads=N, num_groups=G, head_dim=D, impl="triton")

    results = []
    for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, *weight.unbind())]
        main_grad = torch.zeros(D, device=device)
        out = fn(*leaves, main_grad)
        sum((t * t).sum() for t in out).backward()
        results.append([*out, leaves[0].grad, leaves[2].grad, main_grad])
        assert leaves[1].grad is None
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_deterministic_empty_and_refusals(device):
    sizes = {"num_heads": 2, "num_groups": 1, "head_dim": 8}
    weights = {n: torch.ones(8, device=device, requires_grad=True) for n in VECTORS[:2]}
    qkv = torch.randn(9, 2, 32, device=device, requires_grad=True)
    runs = []
    for _ in range(2):
        out = qk_norm(qkv, QKNormParams(**weights), **sizes, impl="triton")
        runs.append(torch.autograd.grad([(t * t).sum() for t in out], [qkv, *weights.values()]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    empty = torch.empty(0, 2, 32, device=device, requires_grad=True)
    sum(t.sum() for t in qk_norm(empty, QKNormParams(**weights), **sizes, impl="triton")).backward()
    assert torch.equal(weights["q_weight"].grad, torch.zeros(8, device=device))

    for wrong in (
        lambda: qk_norm(qkv, QKNormParams(), **sizes),
        lambda: qk_norm(qkv, QKNormParams(**weights), **sizes, kind="l2"),
        lambda: qk_norm(qkv[..., :24], QKNormParams(**weights), **sizes),
        lambda: qk_norm(qkv.transpose(0, 1), QKNormParams(**weights), **sizes),  # it is not copied
        lambda: qk_norm(
            qkv, QKNormParams(q_weight=weights["q_weight"], k_weight=weights["k_weight"][:4]), **sizes
        ),
    ):
        with pytest.raises(ShapeError):
            wrong()
    wide = qkv.detach().double()
    assert "float64" in supports(wide, QKNormParams(), 8)
    with pytest.raises(ConfigError, match="float64"):
        qk_norm(wide, QKNormParams(), **sizes, kind="l2", impl="triton")
