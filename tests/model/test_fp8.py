"""Models in fp8: near bf16, the fused sites equal the plain ones, the sums over microbatches right."""

from __future__ import annotations

import pytest
import torch
from model_cases import gradients, make_batch, make_dropout, make_model, make_shape, run_loss

from redline.build.compile import why_not
from redline.formulas.operators import WITHOUT_LOGITS
from redline.kernels import fp8 as kernels
from redline.kernels.fp8 import FP8_MAX
from redline.model import Fp8Gemms, fp8, fused_ops, local_ops
from redline.model.fp8 import Fp8Gemm, Fp8Site
from redline.model.fp8_blocks import BlockGemm
from redline.model.fp8_head import Fp8Head
from redline.model.modules import Linear
from redline.plan.fp8 import gemm_sites
from redline.precision import Fp8Spec, Fp8State

SIZES = {"hidden": 32, "ffn": 48, "head_dim": 16, "num_heads": 4, "num_groups": 2, "vocab_size": 61}

PARTS = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")


def model_in_fp8(
    kind: str,
    device: str,
    *,
    fused: bool = False,
    layers: int = 2,
    head: bool = False,
    compiled: bool = False,
    **options,
):
    """(model, its fp8 side), weights cast and ready."""
    shape = make_shape(kind, **SIZES, padded_vocab_size=64)
    operators = WITHOUT_LOGITS if fused else frozenset()
    ops = fused_ops(operators) if fused else local_ops()
    model = make_model(shape, torch.bfloat16, device, main_grad=torch.float32, backend="unfused", ops=ops)
    names = [f"layers.{n}.{part}" for n in range(layers) for part in PARTS]
    state = Fp8State(
        names, Fp8Spec(**{"history_len": 4, **options}), device, kernels=fused or device == "cuda"
    )
    gemms = Fp8Gemms(model, state, fused=operators, head=head, compiled=compiled)
    gemms.prepare()
    return model, gemms


def step(model, gemms: Fp8Gemms | None, seeds=(0, 1)) -> list[float]:
    shape, losses = model.shape, []
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    if gemms is not None:
        gemms.prepare()
    for seed in seeds:
        batch = make_batch(shape, B=2, S=13, device=str(next(model.parameters()).device), seed=seed)
        loss = run_loss(model, batch, make_dropout(shape, batch) if shape.hidden_dropout else None)
        loss.backward()
        losses.append(loss.item())
    return losses


def distance(found: dict, wanted: dict) -> float:
    difference = sum((found[name].double() - wanted[name].double()).square().sum() for name in wanted)
    return float((difference / sum(each.double().square().sum() for each in wanted.values())).sqrt())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "geglu"])
@pytest.mark.parametrize(
    "options", [{}, {"recipe": "tensorwise"}, {"format": "e4m3"}, {"wgrad": False}], ids=str
)
def test_near_bf16(kind, options, kernel_device):
    """Operands have 3 bits of mantissa, gradients 2: a sixth of a small model's gradient is noise."""
    plain = make_model(
        make_shape(kind, **SIZES, padded_vocab_size=64),
        torch.bfloat16,
        kernel_device,
        main_grad=torch.float32,
        backend="unfused",
    )
    wanted = step(plain, None)
    model, gemms = model_in_fp8(kind, kernel_device, **options)
    for turn in range(2):  # measured, then by the history
        assert step(model, gemms) == pytest.approx(wanted, rel=0.02), turn
        assert 0.01 < distance(gradients(model), gradients(plain)) < 0.2, turn
        gemms.step()


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("tokens", [50, 128])
def test_a_site_with_scales_of_blocks(recipe, wgrad, tokens, kernel_device):
    """Tokens of very different sizes: what one scale a tensor rounds to 0 is kept; sums add up."""
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(kernel_device, torch.bfloat16)

    sizes = torch.logspace(-5, 5, tokens, base=10).to(kernel_device, torch.bfloat16)[:, None]
    x, dy, weight, bias = normal(tokens, 256), normal(tokens, 128) * sizes, normal(128, 256), normal(128)
    kernels, emulate, found = kernel_device == "cuda", recipe == "mxfp8", {}
    for name in (recipe, "tensorwise"):
        layer = Linear(256, 128, bias=True, linear=None, dtype=torch.bfloat16)
        layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        spec = Fp8Spec(recipe=name, format="e4m3", history_len=1, wgrad=wgrad, emulate=emulate)
        state = Fp8State(["site"], spec, kernel_device, kernels=kernels)
        gemm = (Fp8Gemm if name == "tensorwise" else BlockGemm)("site", layer, state)
        gemm.refresh()
        site, leaf = Fp8Site(None, gemm, fuse_wgrad=True), x.clone().requires_grad_()
        for _ in range(2):
            y = site(leaf)
            y.backward(dy)
        found[name] = y.float(), leaf.grad.float() / sizes, layer.weight.main_grad, layer.bias.main_grad
    X, D, W = x.float(), dy.float(), weight.float()
    wanted = X @ W.T + bias.float(), 2 * (D / sizes) @ W, 2 * D.T @ X, 2 * D.sum(0)
    gaps = {
        name: [((a - b).norm() / b.norm()).item() for a, b in zip(each, wanted, strict=True)]
        for name, each in found.items()
    }
    assert all(gap < 0.05 for gap in gaps[recipe]), gaps
    assert gaps["tensorwise"][1] > 0.3  # half of the gradient's rows are gone


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_an_input_that_is_kept_elsewhere_is_cast_again_to_the_bit(recipe, kernel_device):
    """Also where scales are measured, over microbatches; what is saved is the input itself, and no copy."""
    generator, found = torch.Generator().manual_seed(2), []
    x_STI, dy_STO = (
        torch.randn(2, 3, 25, 128, generator=generator).to(kernel_device, torch.bfloat16) for _ in "xy"
    )
    weight = torch.randn(128, 128, generator=generator).to(kernel_device, torch.bfloat16)
    for again in (False, True):
        layer = Linear(128, 128, bias=False, linear=None, dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(weight.clone())
        layer.weight.main_grad = torch.zeros(128, 128, device=kernel_device)
        spec = Fp8Spec(recipe=recipe, format="e4m3", history_len=1, emulate=True)
        state = Fp8State(["site"], spec, kernel_device, kernels=kernel_device == "cuda")
        gemm = (BlockGemm if spec.blocks else Fp8Gemm)("site", layer, state)
        site, results = Fp8Site(None, gemm, fuse_wgrad=True, again=again), []
        for _ in range(2):  # measured, then by the history
            gemm.refresh()
            for x, dy in zip(x_STI, dy_STO, strict=True):
                leaf = x.clone().requires_grad_()
                y = site(leaf)
                kept = y.grad_fn.saved_tensors[0]
                assert (kept.data_ptr() == leaf.data_ptr()) == again == (kept.dtype == torch.bfloat16)
                y.backward(dy)
                results += [y.detach(), leaf.grad]
            state.step()
        found.append([*results, layer.weight.main_grad, *state.tensors().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_compiled_code_leaves_an_input_that_is_kept_alone(kernel_device):
    """It writes into the memory of what nobody reads any more; so autograd is asked to keep it."""
    if reason := why_not(kernel_device):
        pytest.skip(reason)
    torch._dynamo.reset()
    generator, token, grads = torch.Generator().manual_seed(2), torch.zeros(1, device=kernel_device), []
    x, weight = (torch.randn(n, 64, generator=generator).to(kernel_device, torch.bfloat16) for n in (32, 64))
    for compiled in (False, True):
        layer = Linear(64, 64, bias=False, linear=None, dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(weight)
        layer.weight.main_grad = torch.zeros(64, 64, device=kernel_device)
        gemm = Fp8Gemm("site", layer, Fp8State(["site"], Fp8Spec(wgrad=False), kernel_device))
        gemm.refresh()
        site = Fp8Site(None, gemm, fuse_wgrad=True, token=token if compiled else None)

        def run(x, site=site):
            y = site(2 * x)
            return y, y + 1

        made = torch.compile(run, fullgraph=True) if compiled else run
        sum(made(x.clone().requires_grad_())).sum().backward()
        grads.append(layer.weight.main_grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0.02, atol=0.02 * grads[0].abs().max().item())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "geglu", "limited", "gpt-nopos"])
def test_fused_sites_equal_the_plain_ones(kind, kernel_device):
    """Both round norm and activation to bf16 before the cast; 3 in 100 roundings differ, by an eighth."""
    generator = torch.Generator().manual_seed(3)
    x_SBH, dy_SBH = (
        torch.randn(5, 3, 32, generator=generator).to(kernel_device, torch.bfloat16) for _ in "xy"
    )
    found = []
    for fused in (False, True):
        model, gemms = model_in_fp8(kind, kernel_device, fused=fused, layers=1)
        for _ in range(2):  # measured, then by the history
            x = x_SBH.clone().requires_grad_()
            gemms.prepare()
            qkv = model.layers[0].attention.qkv_site(x)
            mlp = model.layers[0].mlp(x, None)
            torch.autograd.backward([qkv, mlp], [torch.ones_like(qkv), dy_SBH])
            gemms.step()
        grads = {name: each for name, each in gradients(model).items() if "layers.0" in name}
        found.append({"qkv": qkv, "mlp": mlp, "dx": x.grad, "scale": gemms.state.scale, **grads})
    for name, wanted in found[0].items():
        gap = (found[1][name].float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-9)
        assert gap < 0.04, (name, gap)


@pytest.mark.parametrize("fused", [False, True])
def test_a_site_as_one_operator_is_the_site(fused, kernel_device):
    """As compiled blocks call it: losses and gradients are the same bits, over steps and microbatches."""
    found = []
    for compiled in (False, True):
        model, gemms = model_in_fp8("llama", kernel_device, fused=fused, compiled=compiled)
        losses = []
        for _ in range(2):
            gemms.begin_step()
            losses += step(model, gemms)
            gemms.step()
        found.append((losses, {name: each.clone() for name, each in gradients(model).items()}))
    assert found[0][0] == found[1][0]
    if kernel_device == "cpu":  # on a GPU some kernels add in an order of their own
        assert all(torch.equal(each, found[1][1][name]) for name, each in found[0][1].items())


@pytest.mark.parametrize(("kind", "fused"), [("llama", False), ("gpt2", False), ("llama", True)])
def test_the_head_in_fp8(kind, fused, kernel_device):
    """Logits and the gradient that reaches the last layer are near those of a head in bf16, tied or not."""
    shape = make_shape(kind, **SIZES, padded_vocab_size=64)
    model, gemms = model_in_fp8(kind, kernel_device, fused=fused)
    wanted = step(model, gemms), {name: each.clone() for name, each in gradients(model).items()}
    model, gemms = model_in_fp8(kind, kernel_device, fused=fused, head=True)
    assert step(model, gemms) == pytest.approx(wanted[0], rel=0.02)
    found = gradients(model)
    name = "embedding.word.weight" if shape.tied else "head.weight"
    gap = (found[name] - wanted[1][name]).norm() / wanted[1][name].norm()
    assert 1e-3 < gap < 0.1
    assert 1e-3 < distance(found, wanted[1]) < 0.25
    assert gemms.head is not None and gemms.head.q_VH.shape == (64, shape.hidden)


@pytest.mark.parametrize("fuse", [True, False])
def test_the_head_multiplies_what_its_casts_stand_for(fuse, kernel_device):
    """Against float64 of the cast operands: bf16 rounds the results once, fp32 sums lose less."""
    model, _ = model_in_fp8("llama", kernel_device, layers=1)
    weight = model.head_weight
    generator = torch.Generator().manual_seed(5)
    hidden, dy = (
        torch.randn(27, size, generator=generator).to(kernel_device, torch.bfloat16) for size in (32, 64)
    )

    def stands_for(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = (FP8_MAX[dtype] / x.detach().abs().amax().float()).reshape(1)
        q, _ = kernels.cast(x.detach(), scale, torch.zeros_like(scale), dtype, True, False, False)
        return q.double() / scale.double()

    head = Fp8Head(model, kernels=kernel_device == "cuda", fuse_wgrad=fuse)
    head.refresh()
    leaf = hidden.clone().requires_grad_()
    weight.main_grad.fill_(1.0)
    logits = head.linear(leaf, weight)
    logits.backward(dy)
    W = stands_for(weight, torch.float8_e4m3fn)
    X, D = stands_for(hidden, torch.float8_e4m3fn), stands_for(dy, torch.float8_e5m2)
    for found, wanted in ((logits, X @ W.T), (leaf.grad, D @ W)):
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-3)
    exact, rounded = 1.0 + dy.double().T @ hidden.double(), 0.0 if fuse else 2**-8
    torch.testing.assert_close(weight.main_grad.double(), exact, rtol=rounded + 1e-5, atol=8 * rounded + 1e-5)


def test_rows_of_logits_may_lie_apart(kernel_device):
    """As the loss without logits has them where the padded vocabulary is no multiple of 64."""
    model, _ = model_in_fp8("llama", kernel_device, layers=1)
    head = Fp8Head(model, kernels=kernel_device == "cuda")
    head.refresh()
    hidden = torch.randn(27, 32, generator=torch.Generator().manual_seed(5)).to(kernel_device, torch.bfloat16)
    found, wanted = (torch.full((27, width), 7.0).to(hidden) for width in (128, 48))
    head.logits(hidden, found[:, :48])
    head.logits(hidden, wanted)
    assert torch.equal(found[:, :48], wanted) and bool((found[:, 48:] == 7).all())
    gradients_of = [torch.empty_like(hidden) for _ in range(2)]
    head.dhidden(found[:, :48], gradients_of[0])
    head.dhidden(wanted, gradients_of[1])
    assert torch.equal(*gradients_of)


def test_the_first_weight_gradient_of_a_step_is_written(kernel_device):
    """main_grad need not even be zero: what it held is gone, and later microbatches add."""
    model, gemms = model_in_fp8("llama", kernel_device)
    step(model, gemms, seeds=(0, 1))
    wanted = {name: each.clone() for name, each in gradients(model).items()}
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    if kernel_device == "cuda":
        model.layers[0].mlp.fc1.weight.main_grad.fill_(7.0)
    gemms.begin_step()
    for seed in (0, 1):
        batch = make_batch(model.shape, B=2, S=13, device=kernel_device, seed=seed)
        run_loss(model, batch).backward()
    assert all(torch.equal(each, wanted[name]) for name, each in gradients(model).items())


def test_the_bytes_of_the_casts_are_those_of_the_formula(kernel_device):
    """A byte a weight of the layers, two in both layouts, two of the head."""
    model, gemms = model_in_fp8("llama", kernel_device, fused=True, head=True)
    weights = sum(size_out * size_in for _, size_out, size_in in gemm_sites(model.shape))
    assert gemms.copies_bytes == weights + 2 * model.head_weight.numel()
    both = Fp8Gemms(model, gemms.state, fused=WITHOUT_LOGITS, copies=2)
    assert both.copies_bytes == 2 * weights


def test_weights_are_cast_once_a_step(monkeypatch, kernel_device):
    """B034: every microbatch of a step reads the same copy, evaluation included, until parameters change."""
    model, gemms = model_in_fp8("llama", kernel_device)
    cast: list[str] = []
    refresh = fp8.Fp8Gemm.refresh
    monkeypatch.setattr(fp8.Fp8Gemm, "refresh", lambda self: (cast.append("w"), refresh(self)))
    step(model, gemms, seeds=(0, 1, 2, 3))
    assert cast == []
    gemms.step()
    step(model, gemms, seeds=(0, 1))
    assert len(cast) == 8


def test_frozen_weights_get_no_gradient(kernel_device):
    model, gemms = model_in_fp8("llama", kernel_device)
    frozen = model.layers[0].mlp.fc1.weight
    frozen.requires_grad_(False)
    step(model, gemms)
    assert not frozen.main_grad.any() and model.layers[1].mlp.fc1.weight.main_grad.any()


def test_saved_activations_are_the_fp8_copies(kernel_device):
    """Of a fused layer only the inputs of norm and activation are kept in bf16 beside attention's tensors."""
    from model_cases import saved_tensors

    model, gemms = model_in_fp8("llama", kernel_device, fused=True)
    step(model, gemms)
    gemms.step()
    gemms.prepare()
    batch = make_batch(model.shape, B=2, S=16, device=kernel_device)
    saved = saved_tensors(lambda: run_loss(model, batch), model.parameters())
    in_fp8 = sum(each.num_bytes for each in saved if each.dtype == torch.float8_e4m3fn)
    tokens = 2 * 16
    assert in_fp8 == 2 * tokens * (3 * 32 + 48 + (64 - 32))  # inputs of qkv, fc1; proj (q_size 64); fc2
