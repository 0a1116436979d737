"""Storage of optimizer states: exact where it says so, and what each dtype takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from redline.formulas.state import StateDtypes, bytes_per_parameter
from redline.optim import AdamOptions, FlatBuffers, Optimizer

SIZES = ((33, 7), (64,), (5, 129), (3,))


def buffers_of(remainder: bool, moments: torch.dtype | None = None, grad: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(1)
    parameters = [
        (f"p{index}.weight", nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)))
        for index, size in enumerate(SIZES)
    ]
    buffers = FlatBuffers(
        parameters, main_dtype=torch.float32, grad_dtype=grad, exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments, remainder=remainder, device="cpu",
    )  # fmt: skip
    for _, main in buffers.write_main_params():
        main.copy_(torch.randn(main.shape, generator=generator))
    return buffers


def stepped(buffers: FlatBuffers, impl: str, steps: int = 4, **options):
    optimizer = Optimizer(buffers, adam=AdamOptions(beta2=0.95, impl=impl), **options)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for grad in buffers.views("main_grad").values():
            grad.copy_(torch.randn(grad.shape, generator=generator))
        optimizer.step(1e-2, 0.1)
    return optimizer


@pytest.mark.parametrize("moments", [None, torch.bfloat16])
@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_a_parameter_and_its_remainder_are_the_main_parameter_bit_for_bit(impl, moments):
    """Decision: 2 bytes in place of 4, no other number."""
    whole, halves = buffers_of(False, moments), buffers_of(True, moments)
    optimizers = [stepped(buffers, impl) for buffers in (whole, halves)]
    assert halves.flat("main_param")[0].dtype == torch.int16
    for name, main in whole.views("main_param").items():
        assert torch.equal(halves.views("main_param")[name], main)
        # The bf16 parameter is the nearest; at a tie the two storages round to different neighbours.
        param = halves.views("param")[name].float()
        assert torch.all((param - main).abs() <= (main.bfloat16().float() - main).abs())
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(halves.views(kind)[name], whole.views(kind)[name])
    assert optimizers[0].params_norm() == optimizers[1].params_norm()


def test_a_skipped_step_leaves_both_halves():
    buffers = buffers_of(True)
    optimizer = stepped(buffers, "fused", nonfinite_action="skip")
    before = [flat.clone() for kind in ("param", "main_param", "exp_avg") for flat in buffers.flat(kind)]
    buffers.flat("main_grad")[0][0] = torch.inf
    assert not optimizer.step(1e-2, 0.1).applied
    after = [flat for kind in ("param", "main_param", "exp_avg") for flat in buffers.flat(kind)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_moments_in_8_bits_are_near_those_in_fp32(impl):
    """Four steps, gradients of one size: moments to a step of their code, parameters to half a step of lr."""
    wide, coded = buffers_of(True), buffers_of(True, torch.uint8)
    stepped(wide, impl)
    stepped(coded, impl)
    for kind, name in itertools.product(("exp_avg", "exp_avg_sq"), wide.views("exp_avg")):
        want, got = wide.views(kind)[name], coded.views(kind)[name]
        assert got.dtype == torch.bfloat16
        # Each of four roundings is off by at most 1/8 of a number that is no larger than the block's top.
        torch.testing.assert_close(got.float(), want, rtol=0.3, atol=0.06 * want.abs().max().item())
    for name, want in wide.views("main_param").items():
        assert (coded.views("main_param")[name] - want).abs().max() < 4 * 1e-2 * 0.5


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=231, max_size=231))
def test_any_fp32_value_is_stored_and_given_back(words):
    """Every bit pattern, subnormals, infinities and -0 included; a NaN comes back as a NaN."""
    buffers = buffers_of(True)
    value = torch.tensor(words, dtype=torch.int32).view(torch.float32).view(33, 7)
    for name, main in buffers.write_main_params():
        if name == "p0.weight":
            main.copy_(value)
    found = buffers.views("main_param")["p0.weight"]
    same = (found.view(torch.int32) == value.view(torch.int32)) | (found.isnan() & value.isnan())
    assert same.all()


def test_writing_the_parameters_makes_them_the_main_parameters():
    buffers = buffers_of(True)
    for param in buffers.flat("param"):
        param.fill_(1.5)
    buffers.sync_main_params()
    assert all(torch.all(main == 1.5) for main in buffers.views("main_param").values())


def test_bytes_of_a_parameter():
    """Decision: 18 bytes in fp32; 12, or 10 with bf16 gradients, where the whole 8B model fits one card."""
    moments = {"exp_avg": "bf16", "exp_avg_sq": "bf16"}
    assert bytes_per_parameter(StateDtypes()) == 18
    assert bytes_per_parameter(StateDtypes(remainder=True)) == 16
    assert bytes_per_parameter(StateDtypes(remainder=True, **moments)) == 12
    assert bytes_per_parameter(StateDtypes(remainder=True, grad="bf16", **moments)) == 10
    coded = StateDtypes(remainder=True, grad="bf16", exp_avg="fp8", exp_avg_sq="fp8")
    assert bytes_per_parameter(coded) == 8 + 2 * 2 / 64
    buffers = buffers_of(True, torch.uint8, torch.bfloat16)
    size = buffers.flat("param")[0].numel()
    assert sum(each.nbytes for each in buffers.buffers[0].tensors.values()) == size * (8 + 2 * 2 / 64)
    found = buffers_of(True, torch.bfloat16, torch.bfloat16).buffers[0].tensors.values()
    assert sum(each.element_size() for each in found) == 10
