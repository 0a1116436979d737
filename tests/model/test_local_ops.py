"""The plain operations: values against their definitions, gradients by finite differences in float64.

Rounding once: an operation on bf16 equals the float64 result of the same inputs rounded to bf16, but for
the rare element where fp32 arithmetic lands on the other side of a tie: then they are neighbours, one eps
apart.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from redline.errors import ShapeError
from redline.formulas.shape import GATED, ModelShape, RopeScaling
from redline.model import local
from redline.model.rope import RopeTable, rope_table
from redline.model.rope import rotate as rope

ACTIVATIONS = ["gelu", "gelu-tanh", "squared-relu", "quick-geglu", "geglu", "swiglu"]


def make(*size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(*size: int, seed: int = 0) -> Tensor:
    return make(*size, seed=seed).requires_grad_()


def norm_by_hand(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, epsilon: float, zero: bool
) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    y = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
    y = y if weight is None else y * (weight + 1 if zero else weight)
    return y if bias is None else y + bias


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=2),
    size=st.integers(2, 33),
    kind=st.sampled_from(["LayerNorm", "RMSNorm"]),
    zero=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(["plain", "strided", "transposed", "expanded"]),
)
def test_norm_of_any_shape_and_stride(rows, size, kind, zero, dtype, layout):
    """B015: with a last stride that is not 1, statistics were right and scaling was not."""
    x = make(*rows, size, dtype=dtype)
    if layout == "strided":
        x = make(*rows, 2 * size, dtype=dtype)[..., ::2]
    elif layout == "transposed":
        x = make(size, *rows, dtype=dtype).movedim(0, -1)
    elif layout == "expanded":
        x = make(size, dtype=dtype).expand(*rows, size)
    weight = make(size, dtype=dtype, seed=1)
    bias = make(size, dtype=dtype, seed=2) if kind == "LayerNorm" else None
    got = local.norm(x, weight, bias, kind=kind, epsilon=1e-5, zero_centered=zero, dtype=dtype)
    want = norm_by_hand(
        x.double(), weight.double(), bias if bias is None else bias.double(), kind, 1e-5, zero
    )
    assert got.dtype == dtype and got.shape == x.shape
    if dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    else:
        torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert (got != want.to(dtype)).sum() <= 0.01 * got.numel() + 1


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero", [True, False])
def test_norm_gradcheck(kind, zero):
    x, weight = leaf(3, 2, 5), leaf(5, seed=1)
    bias = leaf(5, seed=2) if kind == "LayerNorm" else None

    def run(x, weight, bias):
        return local.norm(x, weight, bias, kind=kind, epsilon=1e-3, zero_centered=zero, dtype=torch.float64)

    assert gradcheck(run, (x, weight, bias))


def test_norm_without_a_gain_is_the_l2_norm():
    x = leaf(3, 2, 2, 4)
    run = lambda x: local.norm(x, None, None, kind="RMSNorm", epsilon=1e-5, zero_centered=True, dtype=x.dtype)  # noqa: E731
    torch.testing.assert_close(run(x), norm_by_hand(x, None, None, "RMSNorm", 1e-5, True))
    assert gradcheck(run, (x,))


def curve(kind: str, x: float) -> float:
    """Each activation's curve, written with the functions of `math`."""
    tanh_gelu = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return {
        "gelu": 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
        "gelu-tanh": tanh_gelu,
        "geglu": tanh_gelu,
        "squared-relu": max(x, 0.0) ** 2,
        "quick-geglu": x / (1 + math.exp(-1.702 * x)),
        "swiglu": x / (1 + math.exp(-x)),
    }[kind]


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_activation(kind, with_bias):
    F_ = 5
    y = make(3, 2, 2 * F_ if kind in GATED else F_)
    bias = make(y.shape[-1], seed=1) if with_bias else None
    got = local.activation(y, bias, kind=kind)
    summed = y if bias is None else y + bias
    gate, up = (summed[..., :F_], summed[..., F_:]) if kind in GATED else (summed, torch.ones_like(summed))
    want = torch.tensor([curve(kind, x) for x in gate.flatten().tolist()]).double().view_as(gate) * up
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    inputs = (y.requires_grad_(), None if bias is None else bias.requires_grad_())
    assert gradcheck(lambda y, bias: local.activation(y, bias, kind=kind), inputs)
    strided = torch.stack((y, y), dim=-1).flatten(-2)[..., ::2]  # B015
    torch.testing.assert_close(local.activation(strided, bias, kind=kind), got)


def test_bias_dropout_add_rounds_once():
    """bf16: one sum of three; rounding y + bias in between would show in a tenth of the elements."""
    y, bias, residual = (
        make(*size, dtype=torch.bfloat16, seed=seed)
        for size, seed in (((9, 4, 16), 0), ((16,), 1), ((9, 4, 16), 2))
    )
    got = local.bias_dropout_add(y, bias, residual, None)
    want = (y.double() + bias.double() + residual.double()).to(torch.bfloat16)
    assert (got != want).float().mean() < 0.005
    assert ((y + bias + residual) != want).float().mean() > 0.05
    wide = local.bias_dropout_add(y, None, residual.float(), None)
    assert wide.dtype == torch.float32 and torch.equal(wide, y.float() + residual.float())


def test_bias_dropout_add_gradcheck():
    inputs = (leaf(3, 2, 4), leaf(4, seed=1), leaf(3, 2, 4, seed=2))
    assert gradcheck(lambda y, bias, residual: local.bias_dropout_add(y, bias, residual, None), inputs)


def rope_shape(**changes) -> ModelShape:
    sizes = {"num_layers": 1, "hidden": 8, "ffn": 8, "num_heads": 1, "num_groups": 1, "vocab_size": 8}
    sizes |= {"padded_vocab_size": 8}
    return ModelShape(**{**sizes, "head_dim": 64, "max_positions": 64, "position": "rope", **changes})


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("percent", [1.0, 0.5, 0.125])
def test_rope_turns_pairs_and_passes_the_rest(interleaved, percent):
    """B017: a partial fraction read past its table. Each pair is a complex number times e^(i angle)."""
    shape = rope_shape(rotary_percent=percent, rotary_interleaved=interleaved)
    S, D, R = 7, 64, shape.rotary_dim
    x = make(S, 2, 3, 2 * D)[..., ::2]
    got = rope(x, rope_table(shape, S, torch.float64, x.device))
    assert torch.equal(got[..., R:], x[..., R:])
    angle = torch.arange(S).double()[:, None] * 10000.0 ** (-torch.arange(R // 2).double() * 2 / R)
    first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    turned = (
        torch.complex(x[..., first], x[..., second])
        * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    )
    torch.testing.assert_close(got[..., first], turned.real)
    torch.testing.assert_close(got[..., second], turned.imag)


def test_rope_refuses_another_table():
    """B017: a table wider or narrower than needed must not be read past its end."""
    table = rope_table(rope_shape(), 7, torch.float32, torch.device("cpu"))
    for size in ((6, 1, 1, 64), (8, 1, 1, 64), (7, 1, 1, 62)):
        with pytest.raises(ShapeError, match="rotary table of 7 positions and 64 channels"):
            rope(torch.zeros(size), table)


def test_rope_gradcheck_and_rounding():
    for interleaved in (True, False):
        shape = rope_shape(head_dim=8, rotary_percent=0.5, rotary_interleaved=interleaved)
        table = rope_table(shape, 3, torch.float64, torch.device("cpu"))
        assert gradcheck(lambda x, table=table: rope(x, table), (leaf(3, 2, 1, 8),))
    x = make(50, 2, 4, 64, dtype=torch.bfloat16)
    got = rope(x, rope_table(rope_shape(), 50, torch.bfloat16, x.device))
    want = rope(x.double(), rope_table(rope_shape(), 50, torch.float64, x.device)).to(torch.bfloat16)
    assert (got != want).float().mean() < 0.002  # angles in fp32, rounded once


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = RopeScaling(factor=8.0, original_max_positions=8192)
    shape = rope_shape(head_dim=128, rotary_base=500000.0, rope_scaling=scaling)
    plain, scaled = (
        rope_table(s, 2, torch.float64, torch.device("cpu"))
        for s in (rope_shape(head_dim=128, rotary_base=500000.0), shape)
    )
    # At position 1 the angle is the frequency itself.
    frequency, got = (torch.atan2(t.sin_SP[1], t.cos_SP[1]) for t in (plain, scaled))
    wavelength = 2 * math.pi / frequency
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and (~short & ~long).any()
    torch.testing.assert_close(got[short], frequency[short])
    torch.testing.assert_close(got[long], frequency[long] / 8)
    blend = (8192 / wavelength - 1) / 3
    between = (1 - blend) * frequency / 8 + blend * frequency
    torch.testing.assert_close(got[~short & ~long], between[~short & ~long])


def test_table_is_only_for_rotary_models():
    assert rope_table(rope_shape(position="none"), 4, torch.float32, torch.device("cpu")) is None
    table = rope_table(rope_shape(), 4, torch.bfloat16, torch.device("cpu"))
    assert isinstance(table, RopeTable) and table.cos_SP.dtype == torch.float32


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing):
    """Against the definition: the target has 1 - smoothing, each other token smoothing / (V - 1)."""
    logits, labels = leaf(6, 11), torch.tensor([0, 10, 3, 3, 7, 1])
    got = local.cross_entropy(logits, labels, label_smoothing=smoothing)
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    target = torch.full((6, 11), smoothing / 10, dtype=torch.float64)
    target[torch.arange(6), labels] = 1 - smoothing
    torch.testing.assert_close(got, -(target * log_probs).sum(-1))
    assert gradcheck(lambda x: local.cross_entropy(x, labels, label_smoothing=smoothing), (logits,))


def test_cross_entropy_of_a_large_vocabulary_in_bf16():
    """B005: beyond about 250 thousand entries, with one logit 30 above the rest."""
    V = 262_147
    logits = make(2, V, dtype=torch.bfloat16)
    logits[:, V - 2] = 30.0
    logits = logits.requires_grad_()
    labels = torch.tensor([V - 1, V - 2])
    loss = local.cross_entropy(logits, labels, label_smoothing=0.0)
    exact = F.cross_entropy(logits.detach().double(), labels, reduction="none")
    assert loss.dtype == torch.float32
    assert (loss.double() - exact).abs().max() < 1e-3
    loss.sum().backward()
    assert logits.grad.double().sum(-1).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_than_two_to_the_31_elements():
    """B019: the last row of a tensor of 2^31 + 4096 elements equals that row alone (needs 40 GiB)."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs a GPU of 40 GiB")
    rows, size = 2**19 + 1, 4096
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    labels = torch.arange(rows, device="cuda") % size

    def norm(x: Tensor) -> Tensor:
        return local.norm(x, None, None, kind="RMSNorm", epsilon=1e-5, zero_centered=False, dtype=x.dtype)

    for run in (norm, lambda x: local.activation(x, None, kind="swiglu")):
        assert torch.equal(run(x)[-2:], run(x[-2:]))
    with torch.no_grad():
        whole = local.cross_entropy(x, labels, label_smoothing=0.0)
    torch.testing.assert_close(whole[-2:], local.cross_entropy(x[-2:], labels[-2:], label_smoothing=0.0))
