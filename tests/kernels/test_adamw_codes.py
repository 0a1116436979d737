"""Moments in 8 bits: what a code keeps, that rounding is fair, and that kernel and twin agree to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import ShapeError
from redline.kernels.adamw import FlatState, adamw_, adamw_hyper, join_main, make_segments, split_main
from redline.kernels.adamw.codes import CODE_BLOCK, HALF, decode, encode, noise_of, round_bf16, salt_of

STILL = {"beta1": 0.75, "beta2": 0.625, "eps": 1e-8}  # exact products: nothing but the codes may differ
FLOATS = st.floats(width=32, allow_nan=False, allow_subnormal=True)
NOISE = st.integers(0, 2 * HALF - 1)


def coded(values, signed, noise=HALF):
    return encode(values, noise, signed=signed)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(FLOATS, min_size=CODE_BLOCK, max_size=CODE_BLOCK), st.booleans(), NOISE, NOISE)
def test_a_code_is_within_one_step(values, signed, noise, other):
    """Any bits, any noise: 3 bits of mantissa down to 2^-15 or 2^-31 of the largest; again the same codes."""
    x = torch.tensor(values)
    x = x if signed else x.abs()
    codes, tops = coded(x, signed, noise)
    got = decode(codes, tops, signed=signed)
    largest = x.abs().max().double()
    powers = 15 if signed else 31
    inside = (x.abs().double() >= largest * 2.0**-powers) & (x.abs() > 2.0**-122) & (x.abs() < 2.0**127)
    error = (got.double() - x.double()).abs()
    assert torch.all(error[inside] <= x[inside].abs().double() / 8)
    assert torch.all(error[~inside & (x.abs() < 2.0**127)] <= max(largest * 2.0**-powers, 2.0**-122))
    assert torch.all(got[x == 0] == 0) and torch.all(got.signbit() <= x.signbit())
    if not signed:  # a moment that is not 0 is never divided by 0
        assert torch.all(got[x > 2.0**-122] > 0)
    assert torch.equal(got, got.bfloat16().float())  # a checkpoint holds that
    again = coded(got, signed, other)
    assert torch.equal(decode(*again, signed=signed), got)
    assert torch.equal(again[0], codes) and torch.equal(
        again[1][got.view(1, -1).any(1)], tops[got.any()[None]]
    )


def test_a_nan_stays_a_nan_and_spoils_only_its_block():
    x = torch.ones(3 * CODE_BLOCK)
    x[70], x[140] = torch.nan, torch.inf
    got = decode(*coded(x, True), signed=True)
    assert got[70].isnan() and got[140].isinf() and torch.all(got[:CODE_BLOCK] == 1)


def test_rounding_is_fair():
    """The mean over steps is the value: 4 standard errors of one of two codes 1/8 apart."""
    x = torch.linspace(1.0, 1.9, CODE_BLOCK)
    x[0] = 4.0
    main = torch.randn(CODE_BLOCK, generator=torch.Generator().manual_seed(0))
    for place, signed in enumerate((True, False)):
        total, steps = torch.zeros(CODE_BLOCK, dtype=torch.float64), 1000
        for step in range(steps):
            noise = noise_of(main, salt_of(step))[place]
            total += decode(*encode(x, noise, signed=signed), signed=signed)
        torch.testing.assert_close(total / steps, x.double(), rtol=0, atol=4 * 0.0625 / steps**0.5)


def test_a_slow_second_moment_moves():
    """beta2 = 0.999: a gradient twice as large moves v by 0.3 % a step. To nearest it never would."""
    main = torch.randn(64 * CODE_BLOCK, generator=torch.Generator().manual_seed(1))
    v, near = (torch.full_like(main, 1.0) for _ in range(2))
    for step in range(1000):
        v, near = 0.999 * v + 0.004, 0.999 * near + 0.004
        v = decode(*encode(v, noise_of(main, salt_of(step))[1], signed=False), signed=False)
        near = decode(*coded(near, False), signed=False)
    true = 4 - 3 * 0.999**1000
    assert torch.all(near == 1.0)
    assert v.mean().item() == pytest.approx(true, rel=0.03)


def state_of(size, device, seed=0):
    gen = torch.Generator().manual_seed(seed)
    param, main = split_main(torch.randn(size, generator=gen))
    m, v = torch.randn(size, generator=gen) * 0.1, torch.rand(size, generator=gen) ** 4
    m[:70], v[:70] = 0.0, 0.0
    (m, m_top), (v, v_top) = encode(m, HALF, signed=True), encode(v, HALF, signed=False)
    tensors = (param, torch.zeros(size), m, v, main, m_top, v_top)
    return FlatState(*(each.to(device) for each in tensors))


def written(state):
    return state.param, state.main, state.exp_avg, state.exp_avg_sq, state.exp_avg_top, state.exp_avg_sq_top


def test_kernel_and_twin_write_the_same_codes(device):
    """No gradient, no learning rate: exact arithmetic, so every byte must agree."""
    fused, plain = state_of(2240, device), state_of(2240, device)
    before = fused.exp_avg.clone()
    for step in (1, 2, 70_000):
        hyper = adamw_hyper(step=step, lr=[0.0], weight_decay=[0.0], **STILL, device=device)
        adamw_(fused, hyper, impl="triton")
        adamw_(plain, hyper, impl="reference")
    assert all(torch.equal(a, b) for a, b in zip(written(fused), written(plain), strict=True))
    assert not torch.equal(fused.exp_avg, before)


@pytest.mark.parametrize("skip", [True, False])
def test_a_step_is_near_that_of_fp32_moments(device, skip):
    """One step from the decoded moments: the same update, as moments are rounded after it; or none."""
    state = state_of(1216, device)
    state.grad.copy_(torch.randn(1216, generator=torch.Generator().manual_seed(5)))
    m = decode(state.exp_avg, state.exp_avg_top, signed=True)
    v = decode(state.exp_avg_sq, state.exp_avg_sq_top, signed=False)
    wide = FlatState(state.param.clone(), state.grad, m, v, state.main.clone())
    segments = make_segments((0, 128), (0, 1), 1216, device)
    hyper = adamw_hyper(
        step=3, lr=[1e-2, 1e-3], weight_decay=[0.1, 0.0], beta1=0.9, beta2=0.95, eps=1e-8, device=device
    )
    flag = torch.tensor(float(skip), device=device)
    before = [each.clone() for each in written(state)]
    adamw_(state, hyper, segments, found_inf=flag)
    if skip:
        assert all(torch.equal(a, b) for a, b in zip(written(state), before, strict=True))
        return
    adamw_(wide, hyper, segments, found_inf=flag)
    assert torch.equal(join_main(state.param, state.main), join_main(wide.param, wide.main))
    got = decode(state.exp_avg, state.exp_avg_top, signed=True)
    torch.testing.assert_close(got, wide.exp_avg, rtol=1 / 8, atol=float(wide.exp_avg.abs().max()) * 2**-15)


def test_a_cut_buffer_gives_the_same_codes(device):
    """Shards cut at multiples of 64: no block, no noise knows where it lies."""
    whole, parts = state_of(2048, device), state_of(2048, device)
    hyper = adamw_hyper(step=9, lr=[1e-2], weight_decay=[0.1], **STILL, device=device)
    for state in (whole, parts):
        state.grad.copy_(torch.linspace(-1, 1, 2048))
    adamw_(whole, hyper)
    for first, last in ((0, 192), (192, 1600), (1600, 2048)):
        tops = slice(first // CODE_BLOCK, last // CODE_BLOCK)
        cut = (
            each[first:last]
            for each in (parts.param, parts.grad, parts.exp_avg, parts.exp_avg_sq, parts.main)
        )
        adamw_(FlatState(*cut, parts.exp_avg_top[tops], parts.exp_avg_sq_top[tops]), hyper)
    assert all(torch.equal(a, b) for a, b in zip(written(whole), written(parts), strict=True))


def test_tops_that_do_not_fit_are_refused():
    state = state_of(128, "cpu")
    hyper = adamw_hyper(step=1, lr=[0.0], weight_decay=[0.0], **STILL, device="cpu")
    with pytest.raises(ShapeError, match="tops do not fit"):
        adamw_(
            FlatState(
                *written(state)[:1], state.grad, *written(state)[2:4], state.main, state.exp_avg_top[:1]
            ),
            hyper,
        )


def test_a_slow_second_moment_in_bf16_moves_alike_in_kernel_and_twin(device):
    """beta2 = 0.999, no gradient: v falls by 0.1 % a step. To the nearest bf16 it would stand still."""
    param, main = split_main(torch.randn(2048, generator=torch.Generator().manual_seed(2)))
    tensors = (
        param,
        torch.zeros(2048),
        torch.zeros(2048).bfloat16(),
        torch.full((2048,), 1e-4).bfloat16(),
        main,
    )
    fused, plain = (FlatState(*(each.clone().to(device) for each in tensors)) for _ in range(2))
    start, steps = plain.exp_avg_sq.double().mean().item(), 400
    for step in range(1, steps + 1):
        hyper = adamw_hyper(
            step=step, lr=[0.0], weight_decay=[0.0], beta1=0.9, beta2=0.999, eps=1e-8, device=device
        )
        if step <= 4:  # exact alike: the product with beta2 is one rounding
            adamw_(fused, hyper, impl="triton")
        adamw_(plain, hyper, impl="reference")
        if step == 4:
            assert torch.equal(fused.exp_avg_sq, plain.exp_avg_sq)
    assert len(fused.exp_avg_sq.unique()) > 1
    assert plain.exp_avg_sq.double().mean().item() == pytest.approx(start * 0.999**steps, rel=0.01)


def test_bf16_values_and_what_is_no_number_stay():
    x = torch.tensor([0.0, -0.0, 1.5, -3.0, torch.inf, -torch.inf, torch.nan, 2.0**-126])
    for noise in (0, 2 * HALF - 1):
        got = round_bf16(x, torch.full((8,), noise, dtype=torch.int32))
        assert torch.equal(got.float().nan_to_num(7.0), x.nan_to_num(7.0)) and got[6].isnan()
        assert torch.equal(got.signbit(), x.signbit())
