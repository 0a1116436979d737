"""The one-pass AdamW against float64, and what must hold bit for bit."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse

from redline.errors import ConfigError, ShapeError
from redline.kernels.adamw import (
    FlatState,
    adamw_,
    adamw_hyper,
    bench,
    join_main,
    make_segments,
    split_main,
    supports,
)
from redline.kernels.common import use_triton

FP32, BF16, FP16, CODES = torch.float32, torch.bfloat16, torch.float16, torch.uint8
STORAGE = (  # param, main ("remainder" beside bf16), gradient, moments
    (FP32, None, FP32, FP32),
    (BF16, FP32, FP32, FP32),
    (FP16, FP32, FP32, FP32),
    (BF16, "remainder", FP32, BF16),
    (BF16, "remainder", BF16, BF16),
    (BF16, None, BF16, BF16),
)
MORE_STORAGE = (  # gradients in fp16, a main parameter in 16 bits, one apart beside moments in bf16
    (FP16, FP32, FP16, FP32),
    (FP16, None, FP16, FP32),
    (BF16, FP32, BF16, BF16),
    (BF16, FP32, FP32, BF16),
    (FP16, FP16, FP32, FP32),
    (BF16, BF16, BF16, FP32),
    (BF16, FP16, FP32, BF16),
)
BETAS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def draw(size, storage, device, seed=0):
    param_dtype, main_dtype, grad_dtype, moment_dtype = storage
    gen = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=gen)
    if main_dtype == "remainder":
        param, main = split_main(values)
    else:
        param, main = values.to(param_dtype), None if main_dtype is None else values.to(main_dtype)
    grad = (torch.randn(size, generator=gen) * 0.1).to(grad_dtype)
    exp_avg = (torch.randn(size, generator=gen) * 0.1).to(moment_dtype)
    exp_avg_sq = (torch.rand(size, generator=gen) * 0.01).to(moment_dtype)
    move = [None if x is None else x.to(device) for x in (param, grad, exp_avg, exp_avg_sq, main)]
    return FlatState(*move)


def clone(state):
    tensors = (getattr(state, field.name) for field in dataclasses.fields(state))
    return FlatState(*(None if x is None else x.clone() for x in tensors))


def written(state):
    return [x for x in (state.param, state.exp_avg, state.exp_avg_sq, state.main) if x is not None]


def main_of(state):
    if state.main is None:
        return state.param
    return join_main(state.param, state.main) if state.main.dtype == torch.int16 else state.main


def exact(state, step, lr, weight_decay, factor):
    """(main parameter, exp_avg, exp_avg_sq) in float64, lr and weight_decay numbers or one an element."""
    p, g = main_of(state).double(), state.grad.double() * factor
    m = 0.9 * state.exp_avg.double() + 0.1 * g
    v = 0.95 * state.exp_avg_sq.double() + 0.05 * g * g
    update = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    return p - lr * (update + weight_decay * p), m, v


def check(device, size, storage, step, factor, cut):
    """Every storage dtype; segments that begin anywhere, several in a block; no worse than the reference."""
    state = draw(size, storage, device)
    starts = sorted({0, cut % max(size, 1), cut * 7 % max(size, 1), cut * 31 % max(size, 1)}) if size else []
    groups = [i % 2 for i in range(len(starts))]
    segments = make_segments(starts, groups, size, device) if size else None
    hyper = adamw_hyper(step=step, lr=[1e-2, 1e-3], weight_decay=[0.1, 0.0], **BETAS, device=device)
    scale = None if factor is None else torch.tensor(factor, device=device)
    assert use_triton("adamw", "auto", supports(state))
    fused, plain = clone(state), clone(state)
    adamw_(fused, hyper, segments, grad_factor=scale)
    adamw_(plain, hyper, segments, grad_factor=scale, impl="reference")
    counts = [b - a for a, b in itertools.pairwise((*starts, size))] if size else []
    group = torch.tensor(groups, dtype=torch.long).repeat_interleave(torch.tensor(counts, dtype=torch.long))
    lr = torch.tensor([1e-2, 1e-3], dtype=torch.float64)[group].to(device)
    decay = torch.tensor([0.1, 0.0], dtype=torch.float64)[group].to(device)
    true = exact(state, step, lr, decay, 1.0 if factor is None else factor)
    assert_no_worse(main_of(fused), main_of(plain), true[0], "main")
    assert_no_worse(fused.exp_avg, plain.exp_avg, true[1], "exp_avg")
    assert_no_worse(fused.exp_avg_sq, plain.exp_avg_sq, true[2], "exp_avg_sq")
    assert torch.equal(fused.grad, state.grad)
    if isinstance(storage[1], torch.dtype):
        assert_no_worse(fused.param, plain.param, true[0], "param")
    if storage[1] in (FP32, storage[0]):
        assert torch.equal(fused.param, fused.main.to(storage[0]))  # the write-back is one rounding


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    size=st.sampled_from((0, 1, 7, 64, 1009, 1024, 2500)),
    storage=st.sampled_from(STORAGE),
    step=st.sampled_from((1, 2, 1000)),
    factor=st.sampled_from((None, 0.37)),
    cut=st.integers(0, 2**20),
)
def test_step_matches_float64(device, size, storage, step, factor, cut):
    check(device, size, storage, step, factor, cut)


@pytest.mark.parametrize("factor", (None, 0.37))
@pytest.mark.parametrize("storage", MORE_STORAGE)
def test_step_in_other_storage_matches_float64(device, storage, factor):
    """Long enough for the noise that rounds bf16 moments to be fair to both."""
    check(device, 2500, storage, 2, factor, 701)


def test_reference_in_float64_is_torch(device):
    state = draw(50, (torch.float64,) * 1 + (None, torch.float64, torch.float64), device)
    param = torch.nn.Parameter(state.param.clone())
    torch_adam = torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state.exp_avg.zero_(), state.exp_avg_sq.zero_()
    for step in range(1, 6):
        param.grad = state.grad.clone()
        torch_adam.step()
        adamw_(state, adamw_hyper(step=step, lr=[1e-2], weight_decay=[0.1], **BETAS, device=device))
    torch.testing.assert_close(state.param, param.detach(), rtol=1e-12, atol=1e-14)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_parameter_and_remainder_are_the_exact_main_parameter(bits):
    """Every bit pattern but NaN's comes back; the parameter is within half a bf16 step, infinity included."""
    main = torch.tensor(bits, dtype=torch.int32).view(FP32)
    param, remainder = split_main(main)
    sound = ~main.isnan()
    assert torch.equal(join_main(param, remainder).view(torch.int32)[sound], main.view(torch.int32)[sound])
    assert param[~sound].isnan().all()
    tie = (main.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[sound & ~tie], main.bfloat16()[sound & ~tie])


@pytest.mark.parametrize("storage", STORAGE + MORE_STORAGE)
def test_skip_leaves_every_bit(device, storage):
    """B114: a NaN gradient with the flag up changes nothing; with the flag down the step is applied."""
    state = draw(1500, storage, device)
    state.grad[3] = float("nan")
    hyper = adamw_hyper(step=1, lr=[1e-2], weight_decay=[0.1], **BETAS, device=device)
    for impl in ("triton", "reference"):
        kept = clone(state)
        adamw_(kept, hyper, found_inf=torch.tensor(1.0, device=device), impl=impl)
        assert all(torch.equal(a, b) for a, b in zip(written(kept), written(state), strict=True))
        adamw_(kept, hyper, found_inf=torch.tensor(0.0, device=device), impl=impl)
        assert main_of(kept)[3].isnan() and main_of(kept)[4] != main_of(state)[4]


@pytest.mark.parametrize("storage", STORAGE + MORE_STORAGE)
def test_cut_anywhere_gives_the_same_bits(device, storage):
    """A buffer split between ranks, with its segments, is bitwise the whole one; so is a second run."""
    state = draw(3000, storage, device)
    hyper = adamw_hyper(step=3, lr=[1e-2, 1e-3], weight_decay=[0.1, 0.0], **BETAS, device=device)
    whole, again = clone(state), clone(state)
    for each in (whole, again):
        adamw_(each, hyper, make_segments([0, 700], [0, 1], 3000, device))
    assert all(torch.equal(a, b) for a, b in zip(written(again), written(whole), strict=True))
    for cut in (16, 704, 1024, 1111):
        parts = clone(state)
        for start, stop in ((0, cut), (cut, 3000)):
            tensors = (parts.param, parts.grad, parts.exp_avg, parts.exp_avg_sq, parts.main)
            part = FlatState(*(None if x is None else x[start:stop] for x in tensors))
            inner = 700 - start
            if 0 < inner < stop - start:
                table = make_segments([0, inner], [0, 1], stop - start, device)
            else:
                table = make_segments([0], [0 if inner > 0 else 1], stop - start, device)
            adamw_(part, hyper, table)
        assert all(torch.equal(a, b) for a, b in zip(written(parts), written(whole), strict=True))


def test_device_hyperparameters_are_the_host_ones(device):
    args = {"lr": [1e-3, 2e-4], "weight_decay": [0.1, 0.0], **BETAS, "device": device}
    host = adamw_hyper(step=7, **args)
    args["lr"] = [torch.tensor(x, dtype=torch.float64, device=device) for x in args["lr"]]
    on_device = adamw_hyper(step=torch.tensor(7, device=device), **args)
    torch.testing.assert_close(on_device.values, host.values, rtol=1e-15, atol=0)


def test_new_hyperparameters_compile_nothing(device):
    if device == "cpu":
        pytest.skip("the interpreter compiles nothing")
    from redline.kernels.adamw.kernel import _adamw_kernel

    caches = _adamw_kernel.kernel.device_caches  # Triton's own, below the launch
    state = draw(1024, STORAGE[0], device)
    for step in (1, 2, 3):
        adamw_(state, adamw_hyper(step=step, lr=[1e-3 / step], weight_decay=[0.1], **BETAS, device=device))
        if step == 1:
            compiled = sum(len(entry[0]) for entry in caches.values())
    assert sum(len(entry[0]) for entry in caches.values()) == compiled > 0


def test_what_is_wrong_is_loud(device):
    state = draw(64, STORAGE[0], device)
    hyper = adamw_hyper(step=1, lr=[1e-2], weight_decay=[0.1], **BETAS, device=device)
    with pytest.raises(ShapeError, match="one length"):
        adamw_(FlatState(state.param, state.grad[:32], state.exp_avg, state.exp_avg_sq), hyper)
    with pytest.raises(ShapeError, match="contiguous"):
        apart = torch.zeros(128, device=device)[::2]
        adamw_(FlatState(state.param, apart, state.exp_avg, state.exp_avg_sq), hyper)
    with pytest.raises(ShapeError, match="bf16 parameter"):
        remainder = torch.zeros(64, dtype=torch.int16, device=device)
        adamw_(FlatState(state.param, state.grad, state.exp_avg, state.exp_avg_sq, remainder), hyper)
    with pytest.raises(ShapeError, match="another length"):
        adamw_(state, hyper, make_segments([0], [0], 63, device))
    with pytest.raises(ShapeError, match="rise"):
        make_segments([0, 9, 9], [0, 0, 0], 64, device)
    with pytest.raises(ConfigError, match="float64"):
        adamw_(draw(4, (torch.float64, None, FP32, FP32), device), hyper, impl="triton")


def test_compiles_without_a_graph_break(device):
    state, traced = (draw(100, STORAGE[1], device) for _ in range(2))
    hyper = adamw_hyper(step=1, lr=[1e-2], weight_decay=[0.1], **BETAS, device=device)
    adamw_(state, hyper)
    torch.compile(lambda: adamw_(traced, hyper), backend="aot_eager", fullgraph=True)()
    assert all(torch.equal(a, b) for a, b in zip(written(state), written(traced), strict=True))


def test_bench_cases_time_equal_things(device, monkeypatch):
    monkeypatch.setattr(bench, "SIZE", 512)
    stored = (("none", FP32), ("separate", FP32), ("remainder", BF16), ("remainder", CODES))
    for main, moments in stored:
        case = bench._case("case", 28, main, moments)
        inputs = case.make_inputs(torch.device(device), case.dtype)
        fused, eager = (case.providers[name]()(*_copy(inputs)) for name in ("fused", "eager"))
        torch.testing.assert_close(fused, eager)
        assert not torch.equal(fused, inputs[0].param)
        assert case.bytes_forward == 28 * 512


def _copy(inputs):
    state, hyper, factor = inputs
    return clone(state), hyper, factor
