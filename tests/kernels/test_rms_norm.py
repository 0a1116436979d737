"""RMSNorm against float64: alone, with the residual addition, every dtype, odd shapes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_operator_no_worse, assert_same, gradients
from wide import NORM_COLUMNS, wide_rows

from redline.errors import ConfigError, ShapeError
from redline.kernels.common import use_triton
from redline.kernels.rms_norm import add_rms_norm, rms_norm, supports
from redline.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS_COLS = [(1, 7), (5, 64), (3, 129), (17, 256), (2, 1000), (40, 96), (2, 11)]
EPS = 1e-5


def _tensors(device, dtype, rows, cols, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual, dy, dsum = (torch.randn(rows, cols, generator=generator).to(device, dtype) for _ in range(4))
    weight = (1.0 + 0.2 * torch.randn(cols, generator=generator)).to(device, dtype)
    return x, residual, weight, dy, dsum


def _unfused(x, weight, zero_centered):
    """The path without the kernel: PyTorch's own rms_norm in the tensor's dtype."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight + 1 if zero_centered else weight, EPS)


def _check(device, dtype, rows, cols, zero_centered=False, seed=0):
    x, _, weight, dy, _ = _tensors(device, dtype, rows, cols, seed)
    assert_operator_no_worse(
        lambda x, w: rms_norm(x, w, EPS, zero_centered=zero_centered, impl="triton"),
        lambda x, w: _unfused(x, w, zero_centered),
        lambda x, w: rms_norm_reference(x, w, EPS, zero_centered),
        (x, weight),
        [dy],
        ("y", "dx", "dweight"),
        f"{dtype} {rows}x{cols}",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), ROWS_COLS)
def test_no_worse_than_unfused(device, dtype, rows, cols):
    _check(device, dtype, rows, cols)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 24),
    cols=st.integers(7, 700),
    dtype=st.sampled_from(DTYPES),
    zero_centered=st.booleans(),
)
def test_any_shape(device, rows, cols, dtype, zero_centered):
    _check(device, dtype, rows, cols, zero_centered, seed=rows)


@wide_rows(cols=NORM_COLUMNS, dtype=st.sampled_from(DTYPES), zero_centered=st.booleans())
def test_any_width(device, rows, cols, dtype, zero_centered):
    _check(device, dtype, rows, cols, zero_centered, seed=rows)


def _check_add(device, dtype, rows, cols, zero_centered):
    """With a residual, and a gradient of the sum as well."""
    x, residual, weight, dy, dsum = _tensors(device, dtype, rows, cols, seed=cols)

    def unfused(x, residual, w):
        total = x + residual
        return _unfused(total, w, zero_centered), total

    assert_operator_no_worse(
        lambda *a: add_rms_norm(*a, EPS, zero_centered=zero_centered, impl="triton"),
        unfused,
        lambda *a: add_rms_norm_reference(*a, EPS, zero_centered),
        (x, residual, weight),
        [dy, dsum],
        ("y", "sum", "dx", "dresidual", "dweight"),
    )


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    cols=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    zero_centered=st.booleans(),
)
def test_add_rms_norm(device, rows, cols, dtype, zero_centered):
    _check_add(device, dtype, rows, cols, zero_centered)


@wide_rows(cols=NORM_COLUMNS, dtype=st.sampled_from(DTYPES), zero_centered=st.booleans())
def test_add_rms_norm_of_any_width(device, rows, cols, dtype, zero_centered):
    _check_add(device, dtype, rows, cols, zero_centered)


@pytest.mark.parametrize("cols", [8191, 8192, 8209])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_takes_several_wide_rows(device, dtype, cols):
    """Up to 8,192 columns backward has two steps ahead, above none. The interpreter has 3 programs."""
    _check_add(device, dtype, 5 if device == "cpu" else 3000, cols, True)


@pytest.mark.parametrize("cols", [4096, 4097, 6144, 6145, 8192, 12289])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_read_again(device, dtype, cols):
    """On either side of each choice of chunks."""
    _check(device, dtype, 3, cols, True)


def test_rows_that_are_read_again_may_lie_apart(device):
    """Rows of a wider tensor give the same bits as their copy."""
    wide, weight = torch.randn(3, 5120, device=device), torch.randn(5003, device=device)
    part = wide[:, 17:5020]
    assert torch.equal(*(rms_norm(x, weight, EPS, impl="triton") for x in (part, part.contiguous())))


def test_chunks_fit_the_row():
    """As few columns beyond the row as chunks of half the size would leave."""
    norms = pytest.importorskip("redline.kernels.wide_norm_triton")
    for cols in range(norms.WIDE + 1, 5 * norms.WIDE, 127):
        for layer in (False, True):
            chunk = norms.wide_config(cols, layer).block_cols
            assert -cols % chunk == -cols % min(chunk, 2048) and chunk in (1024, 2048, 4096)
    assert norms.wide_config(8192, True).num_warps == 8 < norms.wide_config(8192, False).num_warps


@pytest.mark.parametrize(
    ("shared_bytes", "narrow", "wide"), [(232_448, 3, 3), (166_912, 3, 1), (101_376, 3, 1), (49_152, 1, 1)]
)
def test_rows_are_ahead_where_shared_memory_holds_them(shared_bytes, narrow, wide):
    """Hopper's, an A100's, that of cards for a desk, and every card's: rows in 16 bits, and in fp32."""
    norms = pytest.importorskip("redline.kernels.norm_triton")
    for cols in (512, 2048, 4096, 8192):
        config = norms.backward_config(cols)
        assert norms.backward_stages(config, 2 + 2, shared_bytes) == narrow
        assert norms.backward_stages(config, 4 + 4 + 4, shared_bytes) == wide
    assert norms.backward_stages(norms.backward_config(8193), 2, shared_bytes) == 1


def test_fp32_residual_stream_with_bf16_output(device):
    x, residual, weight, _, _ = _tensors(device, torch.bfloat16, 6, 48)
    y, total = add_rms_norm(x, residual.float(), weight, EPS, impl="triton")
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual.float())
    expected, _ = add_rms_norm_reference(x, residual.float(), weight, EPS)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=0)  # one step of bf16
    h = total.detach().requires_grad_()
    assert rms_norm(h, weight, EPS, out_dtype=torch.bfloat16, impl="triton").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "view", ["every second column", "transposed", "expanded rows", "permuted batch", "offset"]
)
def test_strides_b015(device, view):
    """B015: any strides give what the contiguous copy gives, bit for bit, forward and backward."""
    base = torch.randn(6, 4, 64, device=device)
    x = {
        "every second column": base[..., ::2],
        "transposed": base[0].t()[:, :4].t().contiguous().t(),
        "expanded rows": base[:1, :1].expand(6, 4, 64),
        "permuted batch": base.transpose(0, 1),
        "offset": base[..., 3:20],
    }[view]
    weight = torch.randn(x.shape[-1], device=device)
    dy = torch.randn(x.shape, device=device)
    strided = gradients(lambda x, w: rms_norm(x, w, EPS, impl="triton"), (x, weight), [dy])
    leaf = x.detach().requires_grad_()  # `gradients` clones; this one keeps the strides
    y = rms_norm(leaf, weight, EPS, impl="triton")
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert_same(y, strided[0])
    assert_same(dx, strided[1])
    assert_same(y, rms_norm(x.contiguous(), weight, EPS, impl="triton"))
    from_expanded, from_dense = (
        torch.autograd.grad(rms_norm(leaf, weight, EPS, impl="triton"), leaf, dy)[0]
        for dy in (torch.ones_like(y[..., :1]).expand(y.shape), torch.ones_like(y))
    )
    assert_same(from_expanded, from_dense)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_main_grad_with_two_forwards_in_flight(device, impl):
    """The weight's gradient lands in main_grad, added to what is there; two microbatches overlap."""
    x1, x2, weight, dy1, dy2 = _tensors(device, torch.bfloat16, 9, 40)
    weight.requires_grad_()
    main_grad = torch.full((40,), 3.0, device=device)
    y1 = rms_norm(x1, weight, EPS, main_grad=main_grad, impl=impl)
    y2 = rms_norm(x2, weight, EPS, main_grad=main_grad, impl=impl)
    y1.backward(dy1)
    y2.backward(dy2)
    assert weight.grad is None
    exact = weight.detach().double().requires_grad_()
    for x, dy in ((x1, dy1), (x2, dy2)):
        rms_norm_reference(x.double(), exact, EPS).backward(dy.double())
    # fp32 sums of 9 products are a few steps off; the reference rounds each microbatch to bf16.
    tolerance = 1e-5 if impl == "triton" else 2e-2
    torch.testing.assert_close(main_grad.double(), exact.grad + 3.0, rtol=tolerance, atol=tolerance)


def test_compiles_without_graph_break(device):
    x, residual, weight, dy, _ = _tensors(device, torch.float32, 6, 24)
    main_grad, eager_grad = torch.zeros(24, device=device), torch.zeros(24, device=device)

    def block(x, residual, weight, main_grad):
        y, total = add_rms_norm(x, residual, weight, EPS, main_grad=main_grad, impl="triton")
        return rms_norm(y * 2, weight, EPS, impl="triton") + total

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for fn, grad in ((block, eager_grad), (compiled, main_grad)):
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        first, second = fn(*leaves, grad), fn(*leaves, grad)
        results.append(
            [first, *torch.autograd.grad(first, leaves, dy), *torch.autograd.grad(second, leaves, dy)]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(main_grad, eager_grad)
    assert main_grad.abs().sum() > 0


def test_deterministic_and_every_element_written(device):
    """Same bits every run, and no element of an output keeps what was in memory before."""
    x, _, weight, dy, _ = _tensors(device, torch.bfloat16, 33, 72)
    runs = []
    for _ in range(2):
        torch.full(
            (33 * 72 * 4,), float("nan"), device=device
        )  # freed at once: poisons the allocator's next block
        runs.append(gradients(lambda x, w: rms_norm(x, w, EPS, impl="triton"), (x, weight), [dy]))
    for a, b in zip(*runs, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
def test_empty(device, shape):
    x = torch.empty(shape, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)
    rms_norm(x, weight, EPS, impl="triton").sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(16, device=device))


def test_refusals(device):
    x = torch.zeros(2, 8, dtype=torch.float64, device=device)
    weight = torch.ones(8, dtype=torch.float64, device=device)
    assert "float64" in supports(x, weight)
    with pytest.raises(ConfigError, match="float64"):
        rms_norm(x, weight, impl="triton")
    with pytest.raises(ShapeError, match="does not fit"):
        rms_norm(x, weight[:7])
    with pytest.raises(ConfigError, match="unknown"):
        rms_norm(x, weight, impl="fast")
    assert rms_norm(x, weight).dtype == torch.float64
    assert not use_triton("rms_norm", "auto", supports(x, weight))


def test_second_derivative_is_refused(device):
    x = torch.randn(2, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(
        rms_norm(x, torch.ones(8, device=device), impl="triton").sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError):
        dx.sum().backward()
