from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from redline.errors import CheckpointError, TrainingError
from redline.optim import (
    AdamOptions,
    ConstantLossScale,
    DynamicLossScale,
    FlatBuffers,
    Optimizer,
    make_loss_scale,
)

# recipe: (parameter, main, gradient) dtypes and whether the loss is scaled
RECIPES = {
    "fp64": (torch.float64, torch.float64, torch.float64, False),
    "fp32": (torch.float32, torch.float32, torch.float32, False),
    "bf16": (torch.bfloat16, torch.float32, torch.float32, False),
    "bf16-grad16": (torch.bfloat16, torch.float32, torch.bfloat16, False),
    "fp16": (torch.float16, torch.float32, torch.float32, True),
}
STATE = ("main_param", "exp_avg", "exp_avg_sq")


class Model(nn.Module):
    """Embedding, norm, two matrices with a bias, a tied head, and a parameter that nothing uses."""

    def __init__(self, dtype, hidden=12, vocab=20):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return nn.Parameter(
                torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.3).to(dtype)
            )

        self.embedding = draw(vocab, hidden)
        self.norm = draw(hidden)
        self.fc1 = draw(3 * hidden, hidden)
        self.bias = draw(3 * hidden)
        self.fc2 = draw(hidden, 3 * hidden)
        self.unused = draw(5, 3)
        self.head = self.embedding

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding[tokens]
        h = nn.functional.rms_norm(x, self.norm.shape) * self.norm
        x = x + torch.tanh(h @ self.fc1.T + self.bias) @ self.fc2.T
        logits = x @ self.head.T
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return nn.functional.cross_entropy(logits.to(dtype), labels)


class Run:
    """A model with its optimizer, trained on reproducible tokens: step i of two runs sees the same batch."""

    def __init__(self, recipe="fp32", device="cpu", frozen=(), **options):
        dtype, main, grad, scaled = RECIPES[recipe]
        self.model = Model(dtype)
        for name in frozen:
            getattr(self.model, name).requires_grad_(False)
        self.buffers = FlatBuffers(
            self.model.named_parameters(), main_dtype=main, grad_dtype=grad, device=device
        )
        options.setdefault(
            "loss_scale", make_loss_scale(loss_scaling=scaled, initial_scale=2.0**10, window=4)
        )
        self.optimizer = Optimizer(self.buffers, adam=options.pop("adam", AdamOptions(beta2=0.95)), **options)
        self.index = 0

    def backward(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.index)
        self.index += 1
        device = self.buffers.device
        self.buffers.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for _ in range(2):
            tokens = torch.randint(20, (16,), generator=generator).to(device)
            loss = self.model(tokens, (tokens + 1) % 20) / 2
            (loss * self.optimizer.loss_scale.scale).backward()
            total += loss.detach()
        return total

    def train(self, steps, poison=None, lr=1e-2):
        results = []
        for _ in range(steps):
            loss = self.backward()
            if poison and self.index in poison:
                poison[self.index](self, loss)
            results.append(self.optimizer.step(lr, 0.1, loss=loss))
        return results

    def state(self):
        return {
            kind: {n: v.clone() for n, v in self.buffers.views(kind).items()} for kind in (*STATE, "param")
        }


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for kind in left:
        assert left[kind].keys() == right[kind].keys()
        for name, value in left[kind].items():
            assert torch.equal(value, right[kind][name]), f"{kind} of {name}"


def put(name, value):
    """A poison that writes one bad value into a parameter's gradient."""

    def write(run, loss):
        run.buffers.views("main_grad")[name].view(-1)[1] = value

    return write


# ---- training


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns(device, recipe):
    results = Run(recipe, device).train(30)
    assert all(result.applied for result in results)
    assert results[-1].loss < 0.5 * results[0].loss


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_models_without_a_trainable_element_take_steps(grad):
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    for named in ([], [("frozen", frozen)], [("empty", nn.Parameter(torch.ones(0, 4)))]):
        buffers = FlatBuffers(named, main_dtype=torch.float32, grad_dtype=grad, device="cpu")
        result = Optimizer(buffers, adam=AdamOptions(), log_num_zeros=True).step(0.1, 0.1)
        assert (result.applied, result.grad_norm, result.num_zeros) == (True, 0.0, 0)
    assert torch.equal(frozen, torch.ones(3))


@pytest.mark.parametrize("recipe", RECIPES)
def test_same_inputs_give_the_same_bits(recipe):
    first, second = Run(recipe), Run(recipe)
    assert first.train(6) == second.train(6)
    assert_same_bits(first.state(), second.state())


def test_clipped_training_equals_torch(device):
    """Six steps in float64 against clip_grad_norm_ and torch.optim.AdamW, some of them clipped."""
    run = Run("fp64", device, clip_grad=0.5)
    twin = Model(torch.float64).to(device)
    named = dict(twin.named_parameters())
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.dim() > 1 and "bias" not in n else 0.0}
        for n, p in named.items()
    ]
    torch_adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    clipped = 0
    for index in range(6):
        generator = torch.Generator().manual_seed(index)
        torch_adamw.zero_grad()
        for _ in range(2):
            tokens = torch.randint(20, (16,), generator=generator).to(device)
            (twin(tokens, (tokens + 1) % 20) / 2).backward()
        twin.unused.grad = torch.zeros_like(twin.unused)  # a flat buffer's gradient is zero, not absent
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        torch_adamw.step()
        (result,) = run.train(1)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        clipped += result.grad_norm > 0.5
    assert clipped > 0
    for name, param in run.model.named_parameters():
        torch.testing.assert_close(param.detach(), named[name].detach(), rtol=1e-11, atol=1e-11)


def test_loss_scale_does_not_change_training():
    """A power of two goes in with the loss and out with the update without a rounding: fp32 has the range."""
    plain = Run("fp32")
    scaled = Run("fp32", loss_scale=ConstantLossScale(2.0**12))
    for left, right in zip(plain.train(5), scaled.train(5), strict=True):
        assert (left.loss, left.grad_norm) == (right.loss, right.grad_norm)
    assert_same_bits(plain.state(), scaled.state())


def test_decoupled_learning_rate_moves_only_embedding_and_head():
    parameters = {
        name: nn.Parameter(torch.ones(4, 4))
        for name in ("embedding.word.weight", "layers.0.mlp.fc1.weight", "head.weight")
    }
    buffers = FlatBuffers(
        parameters.items(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu"
    )
    for grad in buffers.flat("main_grad"):
        grad.fill_(1.0)
    Optimizer(buffers, adam=AdamOptions(), clip_grad=0.0).step(0.1, 0.0, decoupled_lr=0.4)
    moved = {name: round(1 - param[0, 0].item(), 5) for name, param in parameters.items()}
    assert moved == {"embedding.word.weight": 0.4, "layers.0.mlp.fc1.weight": 0.1, "head.weight": 0.4}


def test_weight_decay_spares_biases_and_norms_and_reaches_unused_weights():
    run = Run("fp64", clip_grad=0.0)
    before = run.state()["param"]
    run.optimizer.step(0.1, 0.5)  # all gradients are zero
    for name, param in run.model.named_parameters():
        factor = 1.0 if name in ("norm", "bias") else 1 - 0.1 * 0.5
        assert torch.equal(param.detach(), before[name] * factor), name


def test_num_zeros_and_params_norm():
    run = Run("bf16", log_num_zeros=True)
    (result,) = run.train(1)
    grads = run.buffers.views("main_grad").values()
    assert result.num_zeros == sum((grad == 0).sum().item() for grad in grads)
    assert result.num_zeros >= run.model.unused.numel()
    exact = math.sqrt(sum(v.double().square().sum().item() for v in run.buffers.views("main_param").values()))
    assert run.optimizer.params_norm() == pytest.approx(exact, rel=1e-6)
    assert Run().train(1)[0].num_zeros is None


# ---- ties, frozen parameters, saved state


def test_b052_tied_head_and_embedding_stay_one():
    """B052: after 20 steps, and after saving and loading."""
    run = Run("bf16")
    run.train(20)
    assert run.model.head is run.model.embedding
    assert run.model.head.data_ptr() == run.buffers.views("param")["embedding"].data_ptr()
    assert "head" not in run.buffers.views("main_param")
    other = resume(run, Run("bf16"))
    assert torch.equal(other.model.head, run.model.embedding)
    assert other.model.head.data_ptr() == other.model.embedding.data_ptr()


def resume(run, fresh):
    """What a checkpoint does: tensors by name, values through JSON."""
    for kind in STATE:
        saved, views = run.buffers.views(kind), fresh.buffers.views(kind)
        for name in saved.keys() & views.keys():
            views[name].copy_(saved[name])
    fresh.buffers.sync_params()
    fresh.optimizer.load_state_values(json.loads(json.dumps(run.optimizer.state_values())))
    fresh.index = run.index
    return fresh


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_b058_frozen_embedding(recipe):
    """B058: the frozen value stays, the rest trains, and states load by name after unfreezing."""
    run = Run(recipe, frozen=["embedding"])
    before = run.state()["param"]
    results = run.train(8)
    after = run.state()
    assert torch.equal(after["param"]["embedding"], before["embedding"])
    assert not torch.equal(after["param"]["fc1"], before["fc1"])
    assert results[-1].loss < results[0].loss
    assert "embedding" in after["main_param"] and "embedding" not in after["exp_avg"]
    assert run.model.embedding.grad is None

    thawed = resume(run, Run(recipe))
    for kind in STATE:
        for name, value in after[kind].items():
            assert torch.equal(thawed.buffers.views(kind)[name].to(value.dtype), value), f"{kind} of {name}"
    thawed.train(2)
    assert not torch.equal(thawed.buffers.views("param")["embedding"], before["embedding"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_resumed_run_continues_bit_for_bit(recipe):
    whole, cut = Run(recipe), Run(recipe)
    whole.train(7)
    cut.train(3)
    resumed = resume(cut, Run(recipe))
    resumed.train(4)
    assert_same_bits(whole.state(), resumed.state())
    assert whole.optimizer.state_values() == resumed.optimizer.state_values()


def test_b059_state_exists_before_the_first_applied_step():
    """B059: saved at step 0, or after a first step that was skipped, a run loads and continues."""
    fresh = Run()
    assert all(
        not value.any() for kind in ("exp_avg", "exp_avg_sq") for value in fresh.state()[kind].values()
    )
    resumed = resume(fresh, Run())
    skipped = Run(nonfinite_action="skip")
    skipped.train(1, poison={1: put("fc1", math.nan)})
    after_skip = resume(skipped, Run())
    assert (after_skip.optimizer.applied_steps, after_skip.optimizer.skipped_steps) == (0, 1)
    after_skip.index = 0
    assert fresh.train(3) == resumed.train(3) == after_skip.train(3)


def test_half_a_state_is_refused():
    with pytest.raises(CheckpointError, match="applied_steps"):
        Run().optimizer.load_state_values({"skipped_steps": 0, "loss_scale": {}})


# ---- NaN and Inf


@pytest.mark.parametrize("recipe", ["fp64", "fp32", "bf16", "bf16-grad16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_b114_bad_gradient_skips_the_step(device, recipe, bad, clip_grad):
    """B114: one bad value at step 5: the step changes no bit, is counted and named, and training goes on."""
    run = Run(recipe, device, nonfinite_action="skip", clip_grad=clip_grad)
    run.train(4)
    before = run.state()
    (result,) = run.train(1, poison={5: put("fc1", bad)})
    assert_same_bits(before, run.state())
    assert not result.applied and result.bad_parameter == "fc1"
    assert result.nonfinite.parameters == ("fc1",)
    assert (run.optimizer.applied_steps, run.optimizer.skipped_steps) == (4, 1)
    after = run.train(3)
    assert all(good.applied and good.nonfinite is None for good in after)
    assert run.optimizer.applied_steps == 7 and math.isfinite(after[-1].loss)


def test_bad_parameters_are_listed_in_backward_order():
    run = Run(nonfinite_action="skip")

    def poison(run, loss):
        for name in ("norm", "fc2", "embedding"):
            put(name, math.inf)(run, loss)

    (result,) = run.train(1, poison={1: poison})
    assert result.nonfinite.parameters == ("fc2", "norm", "embedding")
    assert result.bad_parameter == "fc2"
    assert "'fc2' and of 2 more parameters" in str(result.nonfinite)


def test_stop_raises_with_the_name_and_leaves_the_step_out():
    run = Run()
    run.train(2)
    before = run.state()
    with pytest.raises(TrainingError, match=r"after 2 optimizer steps.*'bias'.*NaN"):
        run.train(1, poison={3: put("bias", math.nan)})
    assert_same_bits(before, run.state())
    assert run.optimizer.skipped_steps == 1


def test_bad_loss_alone_counts():
    run = Run(nonfinite_action="skip")
    (result,) = run.train(1, poison={1: lambda run, loss: loss.fill_(math.nan)})
    assert not result.applied and result.bad_parameter is None and math.isnan(result.loss)
    assert str(result.nonfinite) == "the loss is nan"


def test_norm_overflow_of_finite_gradients_is_told_apart():
    run = Run(nonfinite_action="skip")
    (result,) = run.train(1, poison={1: lambda run, loss: run.buffers.flat("main_grad")[0].fill_(1e30)})
    assert not result.applied and result.nonfinite.parameters == ()
    assert "every gradient is finite" in str(result.nonfinite)


def test_ignore_applies_the_step_and_spoils_only_what_was_bad():
    run = Run(nonfinite_action="ignore")
    (result,) = run.train(1, poison={1: put("fc1", math.nan)})
    assert result.applied and result.bad_parameter == "fc1"
    params = run.buffers.views("param")
    assert params["fc1"].isnan().sum() == 1
    assert not any(params[name].isnan().any() for name in params if name != "fc1")


def test_dynamic_loss_scale_gives_way_without_stopping():
    scaler = DynamicLossScale(scale=8.0, min_scale=2.0, window=2, hysteresis=1)
    run = Run("fp16", loss_scale=scaler, nonfinite_action="stop")
    bad = {index: put("fc1", math.inf) for index in (1, 2, 5)}
    results = run.train(2, poison=bad)
    assert [result.loss_scale for result in results] == [8.0, 4.0] and scaler.scale == 2.0
    assert not any(result.applied for result in results)
    results = run.train(2)
    assert all(result.applied for result in results) and scaler.scale == 4.0
    assert run.train(1, poison=bad)[0].loss_scale == 4.0 and scaler.scale == 2.0
    with pytest.raises(TrainingError):  # at the floor nothing can give way any more
        run.train(1, poison={6: put("fc1", math.inf)})
    assert (run.optimizer.applied_steps, run.optimizer.skipped_steps) == (2, 4)


def test_dynamic_loss_scale_skips_even_under_ignore_and_stops_for_a_bad_loss():
    run = Run("fp16", nonfinite_action="ignore")
    assert not run.train(1, poison={1: put("fc1", math.inf)})[0].applied
    run = Run("fp16", nonfinite_action="stop")
    with pytest.raises(TrainingError, match="the loss is nan"):
        run.train(1, poison={1: lambda run, loss: loss.fill_(math.nan)})


# ---- cost


class LargestNew(TorchDispatchMode):
    """Remembers the largest tensor an operator returned that lies in none of the given storages."""

    def __init__(self, flats):
        super().__init__()
        self.known = {flat.untyped_storage().data_ptr() for flat in flats}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-grad16"])
def test_a_step_allocates_nothing_of_the_models_size(recipe):
    parameters = {"w": nn.Parameter(torch.ones(1 << 10, 1 << 9, dtype=RECIPES[recipe][0]))}
    buffers = FlatBuffers(
        parameters.items(), main_dtype=RECIPES[recipe][1], grad_dtype=RECIPES[recipe][2], device="cpu"
    )
    optimizer = Optimizer(buffers, adam=AdamOptions(), log_num_zeros=True)
    kinds = ("param", "main_param", "main_grad", "exp_avg", "exp_avg_sq")
    flats = [flat for kind in kinds for flat in buffers.flat(kind)]
    pointers = [flat.data_ptr() for flat in flats]
    launches = [launch for each in optimizer.adam.update.launches for launch in each]
    scratch = [wide for launch in launches for _, wide, _, _ in launch.staged]
    with LargestNew([*flats, *scratch]) as seen:
        for _ in range(3):
            buffers.zero_grad()
            parameters["w"].main_grad.fill_(0.1)
            optimizer.step(0.1, 0.1)
    assert 0 < seen.largest <= (1 << 19) // 1024
    assert [flat.data_ptr() for kind in kinds for flat in buffers.flat(kind)] == pointers
    assert parameters["w"].data_ptr() == buffers.flat("param")[0].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_wait_for_the_device_a_step(recipe):
    run = Run(recipe, "cuda", log_num_zeros=True)
    run.train(1)
    loss = run.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.optimizer.step(1e-3, 0.1, decoupled_lr=1e-3, loss=loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([entry for entry in caught if "synchroniz" in str(entry.message)]) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_peak_memory_of_a_step_stays_below_the_model():
    param = nn.Parameter(torch.ones(1 << 13, 1 << 13, dtype=torch.bfloat16, device="cuda"))
    buffers = FlatBuffers([("w", param)], main_dtype=torch.float32, grad_dtype=torch.float32, device="cuda")
    optimizer = Optimizer(buffers, adam=AdamOptions(), log_num_zeros=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step(0.1, 0.1)
    assert torch.cuda.max_memory_allocated() - before < 32 << 20  # the model's gradients alone are 256 MiB
