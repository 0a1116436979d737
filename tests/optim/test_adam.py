from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from redline.errors import ConfigError
from redline.kernels.adamw import noise_of, round_bf16, salt_of
from redline.optim import AdamOptions, AdamW, Step, adam_torch, adamw_reference
from redline.optim.buffer import MOMENTS
from redline.optim.flat import ALIGNMENT, FlatBuffers, Slot
from redline.optim.groups import Group, group_of, segments

OPTIONS = AdamOptions(beta1=0.9, beta2=0.95, eps=1e-8)
NAMES = (
    "embedding.word.weight",
    "head.weight",
    "layers.0.mlp.fc1.weight",
    "layers.0.mlp.fc1.bias",
    "norm.weight",
)
SHAPES = {
    "bias": [(1,), (5,), (130,)],
    "norm": [(1,), (7,), (64,)],
    "matrix": [(1, 1), (3, 5), (8, 64), (17, 9)],
}


@st.composite
def named_shapes(draw):
    """A model of one to seven parameters with the names and shapes that decide the groups."""
    shapes = {}
    for index in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from(NAMES))
        kind = "bias" if name.endswith("bias") else "norm" if "norm" in name else "matrix"
        key = name if name in ("embedding.word.weight", "head.weight") else f"{index}.{name}"
        shapes[key] = draw(st.sampled_from(SHAPES[kind]))
    return shapes


def make(shapes, *, device="cpu", options=OPTIONS, dtype=torch.float32, main=None, grad=None, **moments):
    """Parameters with reproducible values in flat buffers, their AdamW, and what draws gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }
    main = main or dtype
    buffers = FlatBuffers(
        parameters.items(), main_dtype=main, grad_dtype=grad or main, device=device, **moments
    )

    def fill_grads(step):
        generator = torch.Generator().manual_seed(100 + step)
        for param in parameters.values():
            param.main_grad.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))

    return parameters, buffers, AdamW(buffers, options), fill_grads


def state_of(buffers):
    return [flat.clone() for kind in ("main_param", "exp_avg", "exp_avg_sq") for flat in buffers.flat(kind)]


def same_bits(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- groups and segments


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("embedding.word.weight", (8, 4), Group(True, True)),
        ("head.weight", (8, 4), Group(True, True)),
        ("embedding.position.weight", (8, 4), Group(True, False)),
        ("layers.0.attention.qkv.weight", (8, 4), Group(True, False)),
        ("layers.0.attention.qkv.bias", (8,), Group(False, False)),
        ("layers.0.attention.norm.weight", (4,), Group(False, False)),
        ("layers.0.attention.norm.bias", (4,), Group(False, False)),
        ("layers.0.attention.q_norm.weight", (4,), Group(False, False)),
        ("layers.0.moe.experts.bias", (4, 4), Group(False, False)),
    ],
)
def test_group_of(name, shape, expected):
    assert group_of(name, torch.Size(shape)) == expected


@settings(derandomize=True, max_examples=60, deadline=None)
@given(shapes=named_shapes())
def test_segments_cover_every_slot_once_and_merge_neighbours(shapes):
    slots, start = [], 0
    for name, shape in shapes.items():
        slots.append(Slot(name, start, torch.Size(shape)))
        start = slots[-1].padded_end
    ranges = segments(slots)
    ordered = sorted((*piece, group) for group, pieces in ranges.items() for piece in pieces)
    assert ordered[0][0] == 0 and ordered[-1][1] == start
    for (_, end, group), (begin, _, after) in itertools.pairwise(ordered):
        assert end == begin and group != after, "no gap, and neighbours of one group are one"
    for slot in slots:
        group = group_of(slot.name, slot.shape)
        assert any(begin <= slot.start and slot.padded_end <= end for begin, end in ranges[group])
    assert all(begin % ALIGNMENT == 0 and end % ALIGNMENT == 0 for begin, end, _ in ordered)


def test_a_large_model_is_a_handful_of_calls():
    shapes = {"embedding.word.weight": (64, 8)}
    for layer in range(16):
        shapes |= {f"layers.{layer}.norm.weight": (8,), f"layers.{layer}.fc1.weight": (8, 8)}
    _, _, adam, _ = make(shapes | {"head.weight": (64, 8)})
    assert len(adam.update.launches[0]) == 3


# ---- arithmetic


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    shapes=named_shapes(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    decoupled_lr=st.none() | st.just(3e-3),
)
def test_fused_against_float64_reference(device, shapes, dtype, decoupled_lr):
    """Five steps with changing rates, unscaling and one skip, against the plain twin a parameter at once."""
    parameters, buffers, adam, fill_grads = make(shapes, device=device, dtype=dtype)
    twins = {name: [param.detach().double().cpu()] for name, param in parameters.items()}
    for twin in twins.values():
        twin.extend([torch.zeros_like(twin[0]), torch.zeros_like(twin[0])])
    steps = 0
    for index in range(5):
        lr, weight_decay, divisor, skip = 1e-2 / (1 + index), 0.1 * index, 3.0 + index, index == 2
        fill_grads(index)
        grads = {name: param.main_grad.double().cpu() / divisor for name, param in parameters.items()}
        adam.step(
            Step(
                number=steps + 1,
                lr=lr,
                weight_decay=weight_decay,
                decoupled_lr=decoupled_lr,
                grad_scale=torch.tensor(divisor, dtype=torch.float64, device=device),
                found_inf=torch.tensor(float(skip), device=device),
            )
        )
        if skip:
            continue
        steps += 1
        for name, (param, exp_avg, exp_avg_sq) in twins.items():
            group = group_of(name, param.shape)
            adamw_reference(
                param,
                grads[name],
                exp_avg,
                exp_avg_sq,
                steps,
                lr=decoupled_lr if group.decoupled and decoupled_lr else lr,
                weight_decay=weight_decay if group.decays else 0.0,
                options=OPTIONS,
            )
    # About ten roundings a step in values up to 4, an update of at most lr: a few ulps of the values.
    tolerance = {torch.float64: 1e-14, torch.float32: 4e-6}[dtype]
    for name, (param, exp_avg, exp_avg_sq) in twins.items():
        for kind, twin in (("main_param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            got = buffers.views(kind)[name].double().cpu()
            torch.testing.assert_close(got, twin, rtol=tolerance, atol=tolerance)
    for kind in ("main_param", "main_grad", "exp_avg", "exp_avg_sq"):
        for buffer in buffers.buffers:
            for slot in buffer.slots:
                assert not buffer.tensors[kind][slot.end : slot.padded_end].any(), f"{kind} padding"


@settings(derandomize=True, max_examples=15, deadline=None)
@given(shapes=named_shapes(), foreach=st.booleans())
def test_against_torch_adamw(shapes, foreach):
    parameters, _, adam, fill_grads = make(shapes, dtype=torch.float64)
    twins = {name: nn.Parameter(param.detach().clone()) for name, param in parameters.items()}
    groups = [
        {"params": [twin], "weight_decay": 0.1 if group_of(name, twin.shape).decays else 0.0}
        for name, twin in twins.items()
    ]
    torch_adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=foreach)
    for step in range(1, 5):
        fill_grads(step)
        for param, twin in zip(parameters.values(), twins.values(), strict=True):
            twin.grad = param.main_grad.clone()
        adam.step(Step(number=step, lr=1e-2, weight_decay=0.1))
        torch_adamw.step()
    for name, twin in twins.items():
        torch.testing.assert_close(parameters[name].detach(), twin.detach(), rtol=1e-13, atol=1e-13)


def test_reference_is_chosen_by_name_and_agrees(device):
    shapes = {"a.weight": (33, 7), "a.bias": (33,)}
    _, fused_buffers, fused, fill_fused = make(shapes, device=device, dtype=torch.float64)
    plain = AdamOptions(beta1=0.9, beta2=0.95, impl="reference")
    _, plain_buffers, reference, fill_plain = make(shapes, device=device, dtype=torch.float64, options=plain)
    assert (fused.ran, reference.ran) == ("fused", "reference")
    for step, skip in [(1, 0.0), (2, 1.0), (2, 0.0)]:
        for adam, fill in ((fused, fill_fused), (reference, fill_plain)):
            fill(step)
            scale, found_inf = torch.tensor(1.5, device=device), torch.tensor(skip, device=device)
            adam.step(Step(number=step, lr=0.1, weight_decay=0.1, grad_scale=scale, found_inf=found_inf))
    for got, expected in zip(state_of(fused_buffers), state_of(plain_buffers), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_power_of_two_loss_scale_is_exact():
    shapes = {"a.weight": (65, 3)}
    _, plain, adam, fill = make(shapes)
    _, scaled, scaled_adam, scaled_fill = make(shapes)
    for step in (1, 2, 3):
        fill(step)
        adam.step(Step(number=step, lr=0.1, weight_decay=0.1))
        scaled_fill(step)
        for grad in scaled.flat("main_grad"):
            grad.mul_(2.0**16)
        scaled_adam.step(Step(number=step, lr=0.1, weight_decay=0.1, grad_scale=torch.tensor(2.0**16)))
    assert same_bits(state_of(plain), state_of(scaled))


# ---- storage in other dtypes


@pytest.mark.parametrize("chunk", [64, 192, 1 << 22])
@pytest.mark.parametrize(
    ("grad", "exp_avg", "exp_avg_sq"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.bfloat16),
    ],
)
def test_staged_storage_is_the_fp32_update_of_rounded_state(
    device, monkeypatch, chunk, grad, exp_avg, exp_avg_sq
):
    """Bitwise: round the gradient, update in fp32, round the moments; skipped steps change nothing."""
    monkeypatch.setattr(adam_torch, "OPTIMIZER_CHUNK", chunk)
    shapes = {"a.weight": (40, 9), "a.bias": (70,), "head.weight": (5, 5)}
    _, buffers, adam, fill = make(
        shapes,
        device=device,
        dtype=torch.bfloat16,
        main=torch.float32,
        grad=grad,
        exp_avg_dtype=exp_avg,
        exp_avg_sq_dtype=exp_avg_sq,
    )
    _, twin, twin_adam, twin_fill = make(shapes, device=device, dtype=torch.bfloat16, main=torch.float32)
    scale, clean = torch.tensor(3.0, device=device), torch.tensor(0.0, device=device)
    for step in (1, 2, 3):
        fill(step)
        adam.step(Step(number=step, lr=0.1, weight_decay=0.1, grad_scale=scale, found_inf=clean))
        before = state_of(buffers)
        fill(step)
        skipped = Step(
            number=step + 1, lr=0.1, weight_decay=0.1, grad_scale=scale, found_inf=torch.ones_like(clean)
        )
        adam.step(skipped)
        assert same_bits(before, state_of(buffers))

        twin_fill(step)
        for flat in twin.flat("main_grad"):
            flat.copy_(flat.to(grad))
        twin_adam.step(Step(number=step, lr=0.1, weight_decay=0.1, grad_scale=scale, found_inf=clean))
        for kind, dtype in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            for flat, main in zip(twin.flat(kind), twin.flat("main_param"), strict=True):
                noise = noise_of(main, salt_of(step))[MOMENTS.index(kind)]
                flat.copy_(round_bf16(flat, noise) if dtype == torch.bfloat16 else flat.to(dtype))
    for kind in ("main_param", "exp_avg", "exp_avg_sq"):
        for got, expected in zip(buffers.flat(kind), twin.flat(kind), strict=True):
            assert torch.equal(got.float(), expected), kind


def test_bf16_parameters_do_not_lose_tiny_updates():
    """An lr of 2^-12 cannot move 1.0 in bf16 (spacing 2^-8 below it); 256 such updates move it by 1/16."""
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    buffers = FlatBuffers([("w", param)], main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu")
    adam = AdamW(buffers, OPTIONS)
    for step in range(1, 257):
        param.main_grad.fill_(1.0)
        adam.step(Step(number=step, lr=2.0**-12, weight_decay=0.0))
        buffers.sync_params()
    # Every update is lr up to eps/|g| = 1e-8 and 256 fp32 roundings of 2^-25.
    assert buffers.views("main_param")["w"][0, 0].item() == pytest.approx(1 - 2**-4, abs=1e-5)
    assert torch.equal(param.detach(), torch.full((4, 4), 1 - 2**-4, dtype=torch.bfloat16))


# ---- limits


def test_impossible_options_are_refused():
    for options in ({"eps": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": float("nan")}):
        with pytest.raises(ConfigError, match="--adam"):
            AdamOptions(**options)
