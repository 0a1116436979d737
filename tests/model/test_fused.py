"""The fused implementation against the local one: whole models, loss and every gradient.

In fp32 both compute the same sums in another order: 1e-5 of each tensor's largest element. In bf16 they round
at different places, so each is judged by its distance from float64.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from model_cases import (
    Batch,
    gradients,
    make_batch,
    make_dropout,
    make_model,
    make_shape,
    run_loss,
)

from redline.attention import MaskSpec
from redline.formulas.operators import OPERATORS, OPT_IN, WITH_LOGITS, WITHOUT_LOGITS
from redline.formulas.shape import ModelShape
from redline.model import Ops, fused, fused_ops, local_ops
from redline.model.random import dropout_at
from redline.model.rope import rope_table

SIZES = {"hidden": 32, "ffn": 40, "vocab_size": 61, "padded_vocab_size": 64}
MODELS = {
    "gpt": ("gpt2", {"hidden_dropout": 0.1}),
    "gpt, exact gelu": ("gpt-untied-1p", {}),
    "gpt, no positions": ("gpt-nopos", {}),
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"hidden_dropout": 0.1}),
    "llama with q/k norm": ("qwen3", {"tied": False}),
    "neox": ("neox", {}),
    "geglu, l2": ("geglu", {}),
    "quick-geglu, limited": ("limited", {"bias_linear": True}),
}


def case(name: str, **changes) -> ModelShape:
    kind, own = MODELS[name]
    return make_shape(kind, **{**SIZES, **own, **changes})


def train_step(
    shape: ModelShape,
    ops: Ops,
    dtype: torch.dtype,
    device: str,
    main_grad=torch.float32,
    microbatches: int = 2,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of some microbatches, and the gradients summed over them."""
    model = make_model(shape, dtype, device, main_grad=main_grad, backend="unfused", ops=ops)
    losses = []
    for index in range(microbatches):
        batch = make_batch(shape, device=device, seed=index)
        dropout = make_dropout(shape, batch) if shape.hidden_dropout else None
        loss = run_loss(model, batch, dropout)
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("operators", [WITH_LOGITS, WITHOUT_LOGITS], ids=["logits", "no logits"])
def test_fp32_equals_local(name, operators, kernel_device):
    shape = case(name)
    run = {"dtype": torch.float32, "device": kernel_device}
    losses, grads = train_step(shape, fused_ops(operators), **run)
    want_losses, want = train_step(shape, local_ops(), **run)
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=0)
    for key, expected in want.items():
        largest = expected.abs().max().item()
        torch.testing.assert_close(grads[key], expected, rtol=0, atol=1e-5 * largest, msg=key)
        assert largest > 0, key


@pytest.mark.parametrize("name", ["gpt", "llama", "llama with q/k norm"])
def test_bf16_is_no_further_from_float64_than_local(name, kernel_device):
    """The error of all gradients together, and of the loss, at most 1.1 times local's.

    Weights and batch are those of bf16 in all three. A single loss may be nearly exact by
    chance, hence its floor.
    """
    shape = case(name)
    grads, losses = {}, {}
    for label, ops, dtype in (
        ("exact", local_ops(), torch.float64),
        ("local", local_ops(), torch.bfloat16),
        ("fused", fused_ops(), torch.bfloat16),
    ):
        model = make_model(shape, torch.bfloat16, kernel_device, ops=ops, backend="unfused")
        if dtype != torch.bfloat16:
            exact = make_model(shape, dtype, kernel_device, ops=ops, backend="unfused")
            exact.load_state_dict(model.state_dict())
            model = exact
        for parameter in model.parameters():
            wide = torch.promote_types(dtype, torch.float32)
            parameter.main_grad = torch.zeros_like(parameter, dtype=wide)
        losses[label] = 0.0
        for index in range(3):
            batch = make_batch(shape, device=kernel_device, seed=index)
            loss = run_loss(model, batch, make_dropout(shape, batch) if shape.hidden_dropout else None)
            loss.backward()
            losses[label] += loss.item()
        grads[label] = {key: value.double() for key, value in gradients(model).items()}

    def error(label: str) -> float:
        return sum((grads[label][key] - exact).square().sum().item() for key, exact in grads["exact"].items())

    assert error("fused") <= 1.1**2 * error("local")
    floor = 1e-3 * losses["exact"]
    assert abs(losses["fused"] - losses["exact"]) <= max(1.1 * abs(losses["local"] - losses["exact"]), floor)


@pytest.mark.parametrize("name", ["gpt", "llama with q/k norm"])
@pytest.mark.parametrize("main_grad", [None, torch.bfloat16])
def test_gradients_without_main_grad_and_in_another_dtype(name, main_grad, kernel_device):
    shape = case(name)
    run = {"dtype": torch.float32, "device": kernel_device, "main_grad": main_grad, "microbatches": 1}
    _, grads = train_step(shape, fused_ops(), **run)
    _, want = train_step(shape, local_ops(), **run)
    unit = 1e-5 if main_grad is None else 0.01
    for key, expected in want.items():
        atol = unit * expected.abs().max().item()
        torch.testing.assert_close(grads[key], expected, rtol=0, atol=atol, msg=key)


def test_a_model_uses_every_fused_function(kernel_device):
    """Nothing in the record of all operators is a plain function, but the GEMM."""
    plain, kernels = local_ops(), fused_ops(WITHOUT_LOGITS | OPT_IN)
    same = {f.name for f in fields(Ops) if getattr(plain, f.name) is getattr(kernels, f.name)}
    assert same == set() or same == {"linear"}
    assert all(
        getattr(kernels, name) is getattr(fused, name)
        for name in ("embedding", "norm", "qk_norm", "rope", "rope_qkv", "activation", "bias_dropout_add")
    )


@pytest.mark.parametrize("operator", sorted((OPERATORS | OPT_IN) - {"adamw", "grad_norm", "masked_softmax"}))
def test_each_operator_swaps_its_own_entries_only(operator):
    entries = {"rope": {"rope", "rope_qkv"}, "bias_dropout_add": {"bias_dropout_add", "dropout"}}
    entries |= {"cross_entropy": {"head_loss"}, "linear_cross_entropy": {"head_loss"}}
    swapped, plain = fused_ops({operator}), fused_ops(())
    module = "redline.model.fused"
    found, of_plain = set(), set()
    for field in fields(Ops):
        for ops, names in ((swapped, found), (plain, of_plain)):
            function = getattr(ops, field.name)
            if function is not None and getattr(function, "func", function).__module__ == module:
                names.add(field.name)
    assert found == entries.get(operator, {operator}) and not of_plain


def test_masks_are_those_of_local_bit_for_bit(kernel_device):
    """Sites of layers and embedding; a part of a sample; a width that is no multiple of 4."""
    for hidden in (32, 27):
        shape = make_shape("gpt2", hidden=hidden)
        batch = make_batch(shape, device=kernel_device)
        positions = torch.arange(5, 5 + 11, device=kernel_device)
        state = make_dropout(shape, batch, positions_S=positions)
        x = torch.ones(11, 3, hidden, device=kernel_device)
        for narrowed in (state.embedding(), state.layer(0), state.layer(1)):
            site = dropout_at(narrowed, 0, 0.3)
            assert torch.equal(fused.dropout(x, site), local_ops().dropout(x, site))


def test_ignored_tokens_contribute_nothing(kernel_device):
    """B001, B007: labels below 0, weights of 0, a NaN in an ignored token's hidden state, nothing at all."""
    shape = case("llama")
    for operators in (WITH_LOGITS, WITHOUT_LOGITS):
        model = make_model(
            shape, torch.float32, kernel_device, main_grad=torch.float32, ops=fused_ops(operators)
        )
        twin = make_model(shape, torch.float32, kernel_device, main_grad=torch.float32)
        hidden = torch.randn(8, 2, shape.hidden, device=kernel_device)
        labels = torch.randint(0, shape.vocab_size, (2, 8), device=kernel_device)
        weights = torch.rand(2, 8, device=kernel_device)
        labels[0, 3], labels[1, 1], weights[1, 5] = -1, -100, 0.0
        labels[1, 5] = 10**6  # never looked up
        hidden[3, 0] = hidden[5, 1] = float("nan")
        found = []
        for each in (model, twin):
            leaf = hidden.clone().requires_grad_()
            loss = each.loss(leaf, labels, weights)
            loss.backward()
            found.append((loss.detach(), leaf.grad, each.head_weight.main_grad.clone()))
            assert torch.equal(leaf.grad[3, 0], torch.zeros_like(leaf.grad[3, 0]))
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
        nothing = model.loss(hidden.requires_grad_(), torch.full_like(labels, -1), weights)
        assert nothing.item() == 0.0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_writes_no_gradient(mode, kernel_device):
    """B003: the same loss, and main_grad untouched."""
    shape = case("gpt")
    model = make_model(shape, torch.float32, kernel_device, main_grad=torch.float32, ops=fused_ops())
    twin = make_model(shape, torch.float32, kernel_device)
    batch = make_batch(shape, device=kernel_device)
    with mode():
        loss = run_loss(model, batch)
        torch.testing.assert_close(loss, run_loss(twin, batch), rtol=1e-5, atol=0)
    assert loss > 0
    assert all(grad.abs().max() == 0 for grad in gradients(model).values())


def test_padding_of_the_vocabulary_does_not_exist(kernel_device):
    """Padded rows full of 1000: the same loss, and no gradient for them."""
    for operators in (WITH_LOGITS, WITHOUT_LOGITS):
        losses = []
        for padded in (61, 64, 128):
            shape = case("llama", padded_vocab_size=padded)
            model = make_model(
                shape, torch.float32, kernel_device, main_grad=torch.float32, ops=fused_ops(operators)
            )
            with torch.no_grad():
                model.head_weight[61:] = 1000.0
            loss = run_loss(model, make_batch(shape, device=kernel_device))
            loss.backward()
            losses.append(loss.detach())
            assert model.head_weight.main_grad[61:].abs().sum() == 0
        torch.testing.assert_close(losses[1:], losses[:-1], rtol=1e-6, atol=0)


def test_label_smoothing_and_wide_residual_stream(kernel_device):
    shape = case("qwen2")
    batch = make_batch(shape, device=kernel_device)
    options = {"label_smoothing": 0.1, "residual_dtype": torch.float32}
    losses = [
        run_loss(make_model(shape, torch.bfloat16, kernel_device, ops=ops, **options), batch).item()
        for ops in (fused_ops(), local_ops())
    ]
    exact = run_loss(make_model(shape, torch.float64, kernel_device, label_smoothing=0.1), batch).item()
    assert losses[0] == pytest.approx(exact, rel=0.02) and losses[1] == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("operators", [WITH_LOGITS, WITHOUT_LOGITS, frozenset()])
def test_z_loss(operators, kernel_device):
    """Loss, its part and every gradient, beside autograd of its formula in float64."""
    shape, weight = case("llama"), 0.02
    batch = make_batch(shape, device=kernel_device)
    exact = make_model(shape, torch.float64, kernel_device, main_grad=torch.float64)
    hidden = exact(batch.tokens, batch.positions, MaskSpec())
    lse = exact.logits(hidden).logsumexp(-1)
    part = weight * (lse.square() * batch.weights.T).sum()
    wanted = exact.loss(hidden, batch.labels, batch.weights) + part
    wanted.backward()
    model = make_model(shape, torch.float32, kernel_device, main_grad=torch.float32, ops=fused_ops(operators))
    total = torch.zeros((), device=kernel_device)
    loss = run_loss(model, batch, z_loss=weight, z_total=total)
    loss.backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(total.double(), part, rtol=1e-5, atol=0)
    for name, gradient in gradients(exact).items():
        # fp32 sums of a few hundred terms of the size of the largest gradient
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            gradients(model)[name].double(), gradient, rtol=1e-4, atol=1e-5 * scale, msg=name
        )


def test_the_head_runs_over_padded_rows(kernel_device, monkeypatch):
    """Cut to the true vocabulary the GEMM is several times slower; padding is left out behind it."""
    widths = []
    mm = torch.mm

    def spy(a, b, **options):
        widths.append(b.shape[1])
        return mm(a, b, **options)

    monkeypatch.setattr(torch, "mm", spy)
    shape = case("llama")
    with torch.no_grad():
        run_loss(
            make_model(shape, torch.float32, kernel_device, ops=fused_ops()),
            make_batch(shape, device=kernel_device),
        )
    assert widths == [shape.padded_vocab_size]


@pytest.mark.parametrize("name", ["gpt", "llama", "llama with q/k norm"])
def test_a_fused_block_compiles_without_a_graph_break(name, kernel_device):
    """The operators are opaque to the compiler; forward and backward of a block are one graph each."""
    shape = case(name, num_layers=1)
    outputs = []
    for compiled in (False, True):
        model = make_model(
            shape, torch.float32, kernel_device, main_grad=torch.float32, ops=fused_ops(), backend="unfused"
        )
        block = model.layers[0]
        if compiled:
            torch._dynamo.reset()
            block = torch.compile(block, fullgraph=True, backend="aot_eager")
        batch: Batch = make_batch(shape, device=kernel_device)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(11, 3, shape.hidden, generator=generator).to(kernel_device).requires_grad_()
        dropout = make_dropout(shape, batch).layer(0) if shape.hidden_dropout else None
        table = rope_table(shape, 11, torch.float32, x.device)
        y = block(x, table, MaskSpec(), dropout)
        y.square().sum().backward()
        outputs.append((y.detach(), x.grad, gradients(model)["layers.0.mlp.fc1.weight"]))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
