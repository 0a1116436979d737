"""fp8 casts against their plain twin, bit for bit where both round once; GEMMs against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.kernels import fp8
from redline.kernels.activation_reference import Form
from redline.kernels.fp8 import reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = st.tuples(st.sampled_from([1, 3, 16, 50, 129]), st.sampled_from([1, 7, 48, 70]))
LIMITED = [Form("quick", True, 0.75, 1.0), Form("silu", True, 1.5), Form("tanh", True, None, 0.5)]
FORMS = [Form("silu", True), *LIMITED, *(Form(kind) for kind in ("exact", "tanh", "relu2"))]


def tensor(device: str, rows: int, cols: int, seed: int = 0, size: float = 3.0) -> torch.Tensor:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * size
    return values.to(device, torch.bfloat16)


def one(device: str, value: float) -> torch.Tensor:
    return torch.full((1,), value, device=device)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal as numbers (-0 is 0)."""
    return (
        found.shape == wanted.shape
        and found.dtype == wanted.dtype
        and torch.equal(found.float(), wanted.float())
    )


def nearly(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal, but for values whose rounding to bf16 before the cast fell on the other side: 3 in 100.

    Those differ by one step of fp8; where a slope passes through 0, by little beside the largest value.
    """
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    a, b = found.float(), wanted.float()
    bound = 0.26 * torch.maximum(a.abs(), b.abs()) + 1e-4 * b.abs().max()
    return bool(((a - b).abs() <= bound).all()) and (a != b).float().mean().item() <= 0.03


@given(shape=SHAPES, dtype=st.sampled_from([E4M3, E5M2]), scale=st.sampled_from([1.0, 37.5, 1e4, 1e-6]))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_cast_equals_the_twin_in_both_layouts(device, shape, dtype, scale):
    x = tensor(device, *shape)
    found_amax, amax = one(device, 0.0), one(device, 0.0)
    q, qt = fp8.cast(x, one(device, scale), found_amax, dtype, True, True, True)
    want, want_t = reference.cast(x, one(device, scale), amax, dtype, True, True)
    assert same(q, want) and same(qt, want_t)
    assert found_amax.item() == amax.item() == x.abs().max().item()
    assert qt.shape[1] % 16 == 0 and not qt[:, shape[0] :].float().any()


def test_cast_takes_strides_and_leaves_out_what_nobody_wants(device):
    x = tensor(device, 32, 96)[:, 16:64]
    amax = one(device, 0.0)
    q, qt = fp8.cast(x, one(device, 8.0), amax, E4M3, False, True, True)
    assert q.numel() == 0 and same(qt, reference.cast(x, one(device, 8.0), amax, E4M3, True, True)[1])


def test_rows_far_apart_are_brought_together(device):
    """Inside a tile offsets have 32 bits."""
    x = torch.empty_strided((3, 16), (1 << 23, 1), dtype=torch.bfloat16, device=device)
    x.copy_(tensor(device, 3, 16))
    found = fp8.cast(x, one(device, 8.0), one(device, 0.0), E4M3, True, True, True)
    wanted = reference.cast(x, one(device, 8.0), one(device, 0.0), E4M3, True, True)
    assert all(map(same, found, wanted))


def test_values_out_of_range_saturate_and_nan_stays(device):
    """B037: zeros stay zeros at any scale; denormals and infinities give finite results."""
    x = torch.tensor([[0.0, -0.0, 1e-38, 1e30, -1e30, torch.inf, torch.nan, 448.0]], device=device)
    amax = one(device, 0.0)
    q, _ = fp8.cast(x.bfloat16(), one(device, 1.0), amax, E4M3, True, False, True)
    _, qt = fp8.cast(x.bfloat16(), one(device, 1.0), amax, E4M3, False, True, True)
    for values in (q.float()[0].tolist(), qt.float()[:, 0].tolist()):
        assert values[:6] == [0.0, 0.0, 0.0, 448.0, -448.0, 448.0] and values[7] == 448.0
        assert values[6] != values[6]
    assert amax.item() == torch.inf


def test_amax_only_rises(device):
    amax = one(device, 100.0)
    fp8.cast(tensor(device, 8, 8), one(device, 1.0), amax, E4M3, True, False, True)
    assert amax.item() == 100.0


@pytest.mark.parametrize("size", [(50, 48), (16, 33), (256, 128), (256, 40)])
def test_transpose_pads_with_zeros(device, size):
    """One is a whole tile, which goes without masks, one is as high."""
    q = tensor(device, *size).to(E5M2)
    assert same(fp8.transpose(q, True), reference.transposed(q))
    assert same(fp8.transpose(q[1:, 16:], True), reference.transposed(q[1:, 16:]))


@pytest.mark.parametrize(
    ("group", "size", "whole"),
    [
        (1, (48, 64), True),
        (1, (40, 64), False),
        (1, (48, 40), False),
        (2, (64, 64), True),
        (2, (48, 64), False),  # half a group: its second program has no rows
        (0, (48, 64), True),
    ],
)
@pytest.mark.parametrize(("first", "beside", "aligned"), [(16, 32, True), (16, 24, False), (8, 32, False)])
def test_masks_are_left_out_of_whole_tiles_alone(
    device, monkeypatch, group, size, whole, first, beside, aligned
):
    """Of a part of a tensor, from column `first` on: its rows must also begin at multiples of 16 bytes."""
    kernel, launched = pytest.importorskip("redline.kernels.fp8.kernel"), []
    for name in ("transpose", "ragged transpose"):
        monkeypatch.setitem(kernel.TILES, name, kernel.Tile(16, 32, 4, group=group))
    inner = kernel._transpose_kernel

    class Noted:
        def __getitem__(self, grid):
            def launch(*args, **named):
                launched.append(args[7])
                assert launched == [whole and aligned]  # before it writes where it must not
                inner[grid](*args, **named)

            return launch

    monkeypatch.setattr(kernel, "_transpose_kernel", Noted())
    q = tensor(device, size[0], size[1] + beside).to(E5M2)[:, first : first + size[1]]
    assert same(fp8.transpose(q, True), reference.transposed(q)) and launched


@pytest.mark.parametrize("group", [0, 1, 3])
@pytest.mark.parametrize("per_sm", [0, 1])
def test_every_order_of_tiles_takes_each_once(device, monkeypatch, group, per_sm):
    """By columns; in groups of rows, the last one smaller; by programs of several; what is fetched ahead."""
    kernel = pytest.importorskip("redline.kernels.fp8.kernel")
    for name, size in (("cast", (16, 32)), ("norm", (64, 1))):
        monkeypatch.setitem(kernel.TILES, name, kernel.Tile(*size, 4, per_sm))
    for name in kernel.TILES:
        if "backward" in name or "transpose" in name or name == "cast both":
            monkeypatch.setitem(kernel.TILES, name, kernel.Tile(16, 32, 4, group=group))
    monkeypatch.setattr("redline.kernels.fp8.tiles.num_sms", lambda _: 2)
    x, weight, s = tensor(device, 107, 70), tensor(device, 1, 70, 1)[0], one(device, 8.0)
    want, want_t = reference.cast(x, s, one(device, 0.0), E4M3, True, True)
    for columns in (False, True):
        q, qt = fp8.cast(x, s, one(device, 0.0), E4M3, True, columns, True)
        assert same(q, want) and (not columns or same(qt, want_t))
    assert same(fp8.transpose(want, True), want_t)
    whole = want[:96, :64].contiguous()
    assert same(fp8.transpose(whole, True), reference.transposed(whole))
    found, wanted = one(device, 0.0), one(device, 0.0)
    options = (weight, None, False, 1e-5, False, s)
    q, _, rstd = fp8.norm_cast(x, *options, found, E4M3, True)
    want, _, want_rstd = reference.norm_cast(x, *options, wanted, E4M3)
    assert nearly(q, want)
    torch.testing.assert_close((rstd, found), (want_rstd, wanted), rtol=2**-7, atol=0)
    for bias in (None, tensor(device, 1, 70, 3)[0]):
        given = (tensor(device, 107, 35, 2), x, bias, None, *FORMS[0], s, found, E5M2)
        q, qt, dbias = fp8.activation_cast_backward(*given, True)
        want, want_t, want_dbias = reference.activation_cast_backward(*given)
        assert nearly(q, want) and nearly(qt, want_t)
        torch.testing.assert_close(dbias, want_dbias, rtol=2**-6, atol=0.1)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("size", [(5, 48), (33, 70)])
def test_norm_ends_in_fp8(device, layer, size):
    x, weight = tensor(device, *size), tensor(device, 1, size[1], 1)[0]
    bias = tensor(device, 1, size[1], 2)[0] if layer else None
    found, wanted = one(device, 0.0), one(device, 0.0)
    options = (weight, bias, layer, 1e-5, True, one(device, 20.0))
    q, mean, rstd = fp8.norm_cast(x, *options, found, E4M3, True)
    want_q, want_mean, want_rstd = reference.norm_cast(x, *options, wanted, E4M3)
    assert nearly(q, want_q)
    torch.testing.assert_close((mean, rstd), (want_mean, want_rstd), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [False, True])
def test_activation_begins_and_ends_in_fp8(device, form, biased):
    rows, cols = 37, 48
    x, dy = tensor(device, rows, cols), tensor(device, rows, cols // 2 if form.gated else cols, 1)
    bias = tensor(device, 1, cols, 2)[0] if biased else None
    scale, amaxes = one(device, 9.0), [one(device, 0.0) for _ in range(4)]
    q = fp8.activation_cast(x, bias, *form, scale, amaxes[0], E4M3, True)
    assert nearly(q, reference.activation_cast(x, bias, *form, scale, amaxes[1], E4M3))
    main_grads = [torch.zeros(cols, device=device) if biased else None for _ in range(2)]
    found = fp8.activation_cast_backward(dy, x, bias, main_grads[0], *form, scale, amaxes[2], E5M2, True)
    wanted = reference.activation_cast_backward(dy, x, bias, main_grads[1], *form, scale, amaxes[3], E5M2)
    assert nearly(found[0], wanted[0]) and nearly(found[1], wanted[1])
    torch.testing.assert_close(amaxes[0::2], amaxes[1::2], rtol=2**-7, atol=0)
    if biased:
        torch.testing.assert_close(*main_grads, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("gated", [False, True])
def test_an_infinite_bias_counts_in_its_column_alone(device, gated):
    """Where there are no more rows, it would leave NaN in what pads q^T, beside its own column too."""
    rows, cols = 37, 48
    x, dy = tensor(device, rows, cols), tensor(device, rows, cols // 2 if gated else cols, 1)
    bias = tensor(device, 1, cols, 2)[0]
    bias[3] = torch.inf
    form, amax = Form("tanh", gated), one(device, 0.0)
    q, qt, dbias = fp8.activation_cast_backward(dy, x, bias, None, *form, one(device, 9.0), amax, E5M2, True)
    assert not qt.float()[:, rows:].any()
    assert gated or amax.isfinite()  # an open gate lets dy through times infinity
    hit = [3, 3 + cols // 2] if gated else [3]
    others = [column for column in range(cols) if column not in hit]
    assert q.float()[:, others].isfinite().all() and dbias[others].isfinite().all()
    assert dbias[3].isnan()


@pytest.mark.parametrize(("rows", "size_out", "size_in"), [(50, 32, 48), (16, 64, 16)])
def test_gemms_of_a_linear(device, rows, size_out, size_in):
    """Forward, both gradients, a sum over two microbatches, against the values that fp8 tensors stand for."""
    x, w = tensor(device, rows, size_in), tensor(device, size_out, size_in, 1)
    dy = tensor(device, rows, size_out, 2)
    amax, s = one(device, 0.0), one(device, 16.0)
    (q_x, _), (q_w, q_wt) = (
        fp8.cast(x, s, amax, E4M3, True, False, True),
        fp8.cast(w, s, amax, E4M3, True, True, True),
    )
    q_dy, q_dyt = fp8.cast(dy, s, amax, E5M2, True, True, True)
    inverse = s.reciprocal()
    X, W, D = (q.double() / 16 for q in (q_x, q_w, q_dy))

    def close(found: torch.Tensor, wanted: torch.Tensor, digits: int) -> None:
        bound = 2.0**-digits * wanted.abs().max().item()
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=bound)

    close(fp8.gemm(q_x, q_w, inverse, inverse, torch.bfloat16, False), X @ W.T, 7)
    close(fp8.gemm(q_dy, q_wt, inverse, inverse, torch.bfloat16, False), D @ W, 7)
    main_grad = torch.zeros(size_out, size_in, device=device)
    for _ in range(2):
        fp8.add_wgrad(main_grad, q_dyt, fp8.transpose(q_x, True), inverse, inverse, False)
    close(main_grad, 2 * D.T @ X, 12)
