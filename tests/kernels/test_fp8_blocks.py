"""fp8 by blocks: casts against their plain twin, bit for bit, GEMMs against what operands stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.kernels import fp8
from redline.kernels.fp8 import block_reference as reference
from redline.kernels.fp8.block_op import swizzled
from redline.kernels.fp8.tiles import TILES, Tile

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = [128, 32]


def tensor(device: str, rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Values of many sizes: each row and each column has its own."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(rows, 1, generator=generator).mul(2).exp2() * torch.randn(1, cols, generator=generator)
    return (torch.randn(rows, cols, generator=generator) * size).to(device, torch.bfloat16)


def same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.float().nan_to_num(7.5), b.float().nan_to_num(7.5))
        for a, b in zip(found, wanted, strict=True)
    )


@given(value=st.floats(2.0**-100, 2.0**100, width=32), dtype=st.sampled_from([E4M3, E5M2]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_scale_is_the_largest_power_of_two_that_fits(value, dtype):
    k = reference.exponents(torch.tensor([value]), dtype).item()
    assert value * 2.0**k <= fp8.FP8_MAX[dtype] < value * 2.0 ** (k + 1)


@pytest.mark.parametrize("block", BLOCKS)
def test_zeros_denormals_and_what_is_not_finite(block):
    """B037: a block of zeros stays 0, a tiny one is finite, a NaN spoils its own place, Inf its own block."""
    x = torch.zeros(4, 2 * block)
    x[1, 0], x[2, 0], x[3, 0], x[3, 1] = 1e-44, torch.inf, torch.nan, 3.0
    q, inverse, qt, _ = reference.block_cast(x, E4M3, block, True)
    found = reference.restore(q, inverse, block, False)
    assert inverse.isfinite().all() and (inverse > 0).all() and not found[0].any() and not found[4:].any()
    assert found[1].isfinite().all() and found[2, 0] > 1e38 and not found[2, block:].any()
    assert found[3].isnan().sum() == 1 and found[3, 1] == 3.0 and qt.shape == (2 * block, 128)


@pytest.mark.parametrize("block", BLOCKS)
def test_restored_values_are_near(block):
    """3 bits of mantissa: a sixteenth of a value, and 2^-9 of a block's scale where it is small."""
    x = tensor("cpu", 50, 256)
    q, inverse, qt, inverse_t = reference.block_cast(x, E4M3, block, True)
    scale = inverse.T.repeat_interleave(block, 1)[:50]
    rows = reference.restore(q, inverse, block, False)[:50]
    assert ((rows - x.float()).abs() <= x.float().abs() / 16 + scale * 2.0**-10).all()
    columns = reference.restore(qt, inverse_t, block, False)[:, :50].T
    assert 0 < (columns - x.float()).norm() < 0.04 * x.float().norm()
    assert not torch.equal(rows, columns)  # other blocks


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("block", "size"), [(128, (130, 128)), (32, (33, 160))])
def test_casts_equal_the_twin(device, block, size, given, dtype):
    """Blocks with one NaN or one infinity, of zeros, denormals and the largest numbers, of NaN alone."""
    x = tensor(device, *size).to(given)
    x[3, 5], x[4], x[5, :block], x[7, 9], x[8, 11] = torch.nan, 0.0, torch.nan, torch.inf, -torch.inf
    tiny, largest = torch.finfo(given).tiny, torch.finfo(given).max
    denormals = given == torch.float32 or device != "cpu"  # the interpreter makes 0 of them in bf16
    x[9], x[10], x[:, 64] = tiny / 4 if denormals else tiny, largest, torch.nan
    for columns in (False, True):
        found = fp8.block_cast(x, dtype, block, columns, True)
        wanted = reference.block_cast(x, dtype, block, columns)
        assert same(found, wanted)


def test_a_part_of_a_tensor_is_cast_in_tiles_of_any_size(device, monkeypatch):
    """Rows that begin anywhere; tiles that end beyond the last row and column, taken out of their order."""
    monkeypatch.setitem(TILES, "blocks", Tile(64, 128, 4, group=2))
    x = tensor(device, 70, 197)[3:, 2:194]
    assert same(fp8.block_cast(x, E4M3, 32, True, True), reference.block_cast(x, E4M3, 32, True))


@given(k=st.integers(-126, 127), mantissa=st.integers(0, 127), dtype=st.sampled_from([E4M3, E5M2]))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_scales_of_every_size_equal_the_twin(device, k, mantissa, dtype):
    """About a mantissa of 1.75 an exponent changes; about 2^126 the scale is held."""
    x = torch.tensor([1.75, 1 + mantissa / 128, -1.7578125, 1.0]).mul(2.0**k)[:, None].repeat(1, 32)
    x = x.to(device, torch.bfloat16)
    assert same(fp8.block_cast(x, dtype, 32, True, True), reference.block_cast(x, dtype, 32, True))


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_weights_equal_the_twin(device, given):
    w = tensor(device, 128, 256).to(given)
    w[0, 0], w[0, 1], w[:, 128:] = torch.nan, torch.inf, w[:, 128:] * 1e-20
    assert same(fp8.square_cast(w, E4M3, True), reference.square_cast(w, E4M3))
    q, inverse, qt, inverse_t = reference.square_cast(w, E4M3)
    rows, columns = reference.restore(q, inverse, 128, True), reference.restore(qt, inverse_t, 128, True)
    assert torch.equal(rows.nan_to_num(7.5), columns.T.nan_to_num(7.5))


@pytest.mark.parametrize("group", [0, 2])
def test_squares_are_cast_once_each_whatever_their_tile(device, monkeypatch, group):
    """They have no masks: a program too many would write beyond the weight."""
    monkeypatch.setitem(TILES, "squares", Tile(128, 128, 8, group=group))
    launched, w = [], tensor(device, 384, 256)
    kernel = pytest.importorskip("redline.kernels.fp8.block_kernel")
    inner = kernel._square_cast_kernel

    class Noted:
        def __getitem__(self, grid):
            launched.append(grid)
            assert grid == (2, 3)  # before it writes where it must not
            return inner[grid]

    monkeypatch.setattr(kernel, "_square_cast_kernel", Noted())
    assert same(fp8.square_cast(w, E4M3, True), reference.square_cast(w, E4M3))
    assert launched


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [50, 384])
def test_gemms_on_hopper_equal_the_emulation(tokens):
    """All three GEMMs of a linear, padding included: tensor cores sum blocks with a few bits less.

    E4M3 throughout: PyTorch 2.11 refuses blocks of E5M2, and so does the plan.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuBLAS scales blocks of 128 on Hopper alone")
    x, w, dy = tensor("cuda", tokens, 384), tensor("cuda", 256, 384, 1), tensor("cuda", tokens, 256, 2)
    q, inverse, qt, inverse_t = fp8.block_cast(x, E4M3, 128, True, True)
    weights = fp8.square_cast(w, E4M3, True)
    d, d_inverse, dt, dt_inverse = fp8.block_cast(dy, E4M3, 128, True, True)
    for args in (
        (q, weights[0], inverse, weights[1], 128, True, torch.bfloat16),
        (d, weights[2], d_inverse, weights[3], 128, True, torch.bfloat16),
        (dt, qt, dt_inverse, inverse_t, 128, False, torch.float32),
    ):
        found, wanted = (fp8.block_gemm(*args, emulate).float() for emulate in (False, True))
        assert (found - wanted).norm() < 0.01 * wanted.norm(), args[-1]


def test_swizzled_scales_lie_in_tiles():
    """Row 32 a + b and block c of a tile of 128 x 4 stand at 16 b + 4 a + c; a tile of 512 bytes each."""
    k = torch.arange(-100, 28).repeat(5, 2)  # [K / 32 = 5, M = 256], by row alone
    k[4] += 1
    bytes_found = swizzled(reference.power(k.int())).view(torch.uint8)
    assert bytes_found.numel() == 2 * 2 * 512
    for row, block in [(0, 0), (33, 2), (200, 3), (255, 4)]:
        tile = row // 128 * 2 + block // 4
        a, b = divmod(row % 128, 32)
        at = tile * 512 + 16 * b + 4 * a + block % 4
        assert bytes_found[at] == k[block, row] + 127
