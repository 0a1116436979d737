"""The Triton norm and update against PyTorch's: clipping, loss scale, skips, storage dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from redline.optim import AdamOptions, DynamicLossScale, FlatBuffers, Optimizer

SHAPES = {
    "embedding.word.weight": (21, 8),
    "layers.0.norm.weight": (8,),
    "layers.0.fc1.weight": (40, 30),
    "layers.0.fc1.bias": (40,),
    "empty.weight": (0, 4),
    "head.weight": (21, 8),
}
# recipe: (parameter, main, gradient, moments)
RECIPES = {
    "fp32": (torch.float32, torch.float32, torch.float32, None),
    "bf16": (torch.bfloat16, torch.float32, torch.float32, None),
    "bf16 gradients": (torch.bfloat16, torch.float32, torch.bfloat16, None),
    "bf16 moments": (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16),
    "8-bit moments": (torch.bfloat16, torch.float32, torch.float32, torch.uint8),
}
STATE = ("param", "main_param", "exp_avg", "exp_avg_sq")


class Run:
    def __init__(self, recipe: str, impl: str, device: str, **options):
        dtype, main, grad, moments = RECIPES[recipe]
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            name: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
            for name, shape in SHAPES.items()
        }
        self.buffers = FlatBuffers(
            self.parameters.items(),
            main_dtype=main,
            grad_dtype=grad,
            exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments,
            device=device,
        )
        adam = AdamOptions(beta2=0.95, impl=impl)
        self.optimizer = Optimizer(
            self.buffers, adam=adam, fused_norm=impl == "triton", log_num_zeros=True, **options
        )

    def step(self, index: int, size: float = 1.0, **options):
        generator = torch.Generator().manual_seed(index)
        scale = self.optimizer.loss_scale.scale
        for parameter in self.parameters.values():
            grad = size * scale * torch.randn(parameter.shape, generator=generator)
            grad.view(-1)[::7] = 0.0
            parameter.main_grad.copy_(grad)
        return self.optimizer.step(1e-2 / (1 + index), 0.1, **options)

    def state(self) -> list[torch.Tensor]:
        return [flat.clone() for kind in STATE for flat in self.buffers.flat(kind)]


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "8-bit moments"])
def test_steps_equal_those_of_torch(recipe, clip, kernel_device):
    """Six steps, some clipped; a few roundings of fp32 a step, or one of the moments' dtype.

    (A last bit of a parameter changes the noise that rounds to 8 bits: tests/kernels compares those.)
    """
    triton, torch_ = (Run(recipe, impl, kernel_device, clip_grad=clip) for impl in ("triton", "fused"))
    assert (triton.optimizer.adam.ran, torch_.optimizer.adam.ran) == ("triton", "fused")
    for index in range(6):
        decoupled = 3e-3 if index % 2 else None
        got, want = (run.step(index, 0.02 * (1 + index), decoupled_lr=decoupled) for run in (triton, torch_))
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-6)
        assert got.num_zeros == want.num_zeros > 0
    tolerance = 1e-5 if recipe in ("fp32", "bf16", "bf16 gradients") else 0.02
    for kind in STATE:
        for a, b in zip(triton.buffers.flat(kind), torch_.buffers.flat(kind), strict=True):
            close = 0.01 if a.dtype == torch.bfloat16 else tolerance
            torch.testing.assert_close(a, b, rtol=close, atol=tolerance)


def test_parameters_are_the_rounded_main_parameters(kernel_device):
    """Written in the same pass: nothing else rounds them."""
    run = Run("bf16", "triton", kernel_device)
    run.step(0)
    for param, main in zip(run.buffers.flat("param"), run.buffers.flat("main_param"), strict=True):
        assert torch.equal(param, main.to(param.dtype)) and main.abs().sum() > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skipped_step_changes_nothing(recipe, kernel_device):
    run = Run(
        recipe,
        "triton",
        kernel_device,
        loss_scale=DynamicLossScale(2.0**8, window=3),
        nonfinite_action="skip",
    )
    run.step(0)
    before = run.state()
    for bad in (float("nan"), float("inf")):
        result = run.step(1, bad)
        assert not result.applied and result.nonfinite is not None
        assert same_bits(before, run.state())
    assert run.step(1).applied and not same_bits(before, run.state())


def test_a_power_of_two_loss_scale_changes_nothing(kernel_device):
    plain = Run("fp32", "triton", kernel_device)
    scaled = Run("fp32", "triton", kernel_device, loss_scale=DynamicLossScale(2.0**12))
    for index in range(3):
        assert plain.step(index).grad_norm == scaled.step(index).grad_norm
    assert same_bits(plain.state(), scaled.state())


def test_resume_is_bit_identical(kernel_device):
    whole, first = Run("bf16", "triton", kernel_device), Run("bf16", "triton", kernel_device)
    for index in range(5):
        whole.step(index)
    for index in range(2):
        first.step(index)
    second = Run("bf16", "triton", kernel_device)
    for kind in ("main_param", "exp_avg", "exp_avg_sq"):
        for name, view in second.buffers.views(kind).items():
            view.copy_(first.buffers.views(kind)[name])
    second.buffers.sync_params()
    second.optimizer.load_state_values(first.optimizer.state_values())
    for index in range(2, 5):
        second.step(index)
    assert same_bits(whole.state(), second.state())


def test_nothing_to_train(kernel_device):
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    for named in ([], [("frozen", frozen)], [("empty", nn.Parameter(torch.ones(0, 4)))]):
        buffers = FlatBuffers(named, main_dtype=torch.float32, grad_dtype=torch.float32, device=kernel_device)
        fused = {"adam": AdamOptions(impl="triton"), "fused_norm": True}
        result = Optimizer(buffers, log_num_zeros=True, **fused).step(0.1, 0.1)
        assert (result.applied, result.grad_norm, result.num_zeros) == (True, 0.0, 0)
