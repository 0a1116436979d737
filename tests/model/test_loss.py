"""Head and loss: a token that does not count contributes exactly nothing, and padding does not exist."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_cases import gradients, make_batch, make_model, make_shape, run_loss
from torch import Tensor

from redline.model import Transformer


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request) -> Transformer:
    return make_model(make_shape("llama", tied=request.param))


def make_hidden(model: Transformer, S: int = 8, B: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(S, B, model.shape.hidden, generator=generator, dtype=torch.float64).requires_grad_()


def head_weight(model: Transformer) -> Tensor:
    return (model.embedding.word if model.head is None else model.head).weight


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, V: int) -> Tensor:
    """Token by token, only those that count."""
    total = hidden.new_zeros(())
    for b, s in ((b, s) for b in range(labels.shape[0]) for s in range(labels.shape[1])):
        if labels[b, s] >= 0 and weights[b, s] != 0:
            logits = hidden[s, b] @ weight[:V].T
            total = total + weights[b, s] * (logits.logsumexp(0) - logits[labels[b, s]])
    return total


@pytest.mark.parametrize("off", ["weight 0", "label -100", "label -1"])
def test_ignored_tokens(model, off):
    """B001, B007: 60 % of the tokens do not count; loss and gradients are those of the others alone."""
    V = model.shape.vocab_size
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (2, 8), generator=generator)
    weights = torch.full((2, 8), 1 / 6)
    ignored = torch.rand(2, 8, generator=generator) < 0.6
    assert 3 < ignored.sum() < 14
    if off == "weight 0":
        weights[ignored] = 0.0
    else:
        labels[ignored] = int(off.split()[1])
    hidden, weight = make_hidden(model), head_weight(model)
    loss = model.loss(hidden, labels, weights)
    loss.backward()
    got = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    want = plain_loss(hidden, weight, labels, weights.double(), V)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, (hidden.grad, weight.grad))
    assert got[0].norm() > 0
    assert torch.equal(
        got[0].transpose(0, 1)[ignored], torch.zeros(int(ignored.sum()), model.shape.hidden).double()
    )


def test_a_mean_divides_by_the_tokens_that_count():
    """B007: the caller's weights are 1 / count, and a wrong count (8 for 5) is seen by this test."""
    model = make_model(make_shape("llama"))
    labels = torch.tensor([[5, -1, 7, 9, -1, 3, -1, 2]])
    hidden = make_hidden(model, 8, 1)
    counted = labels >= 0
    per_token = F.cross_entropy(model.logits(hidden)[:, 0], labels[0].clamp_min(0), reduction="none")
    mean = per_token[counted[0]].mean()
    torch.testing.assert_close(model.loss(hidden, labels, counted.double() / 5), mean)
    assert not torch.isclose(model.loss(hidden, labels, counted.double() / 8), mean)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_hidden_state_of_an_ignored_token_poisons_nothing(model, poison):
    """0 x NaN is NaN: neither the loss nor the weight's gradient may see that product."""
    labels, weights = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8)
    labels[0, 3], weights[1, 5] = -1, 0.0
    labels[1, 5] = 10**6  # its label is never looked up
    hidden = make_hidden(model)
    with torch.no_grad():
        hidden[3, 0] = hidden[5, 1] = poison
    model.loss(hidden, labels, weights).backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(head_weight(model).grad).all()
    assert hidden.grad[3, 0].abs().max() == hidden.grad[5, 1].abs().max() == 0


def test_nothing_counts(model):
    hidden = make_hidden(model)
    loss = model.loss(hidden, torch.full((2, 8), -1), torch.ones(2, 8))
    loss.backward()
    assert loss == 0 and hidden.grad.abs().max() == 0 and head_weight(model).grad.abs().max() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_only(model, mode):
    """B003: with no gradient wanted the loss came out as 0. Four tokens, all with target 0."""
    hidden, labels, weights = make_hidden(model, 4, 1), torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4)
    want = plain_loss(hidden, head_weight(model), labels, weights.double(), model.shape.vocab_size)
    with mode():
        got = model.loss(hidden.detach(), labels, weights)
    torch.testing.assert_close(got, want.detach())
    assert got > 0


def test_the_loss_leaves_logits_and_hidden_as_they_were(model):
    """B011: a fused loss wrote over the logits, and accuracy read afterwards was 0."""
    hidden = make_hidden(model)
    before, logits = hidden.detach().clone(), model.logits(hidden).detach().clone()
    labels = logits.argmax(-1).T
    model.loss(hidden, labels, torch.ones(2, 8)).backward()
    assert torch.equal(hidden, before)
    assert (labels == model.logits(hidden).argmax(-1).T).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_of_the_loss(dtype, device):
    shape = make_shape("llama")
    loss = run_loss(make_model(shape, dtype, device), make_batch(shape, device=device))
    want = run_loss(make_model(shape), make_batch(shape))
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and loss.shape == ()
    # two layers with activations of order 1: a few roundings of the dtype in each logit
    unit = torch.finfo(dtype).eps
    assert abs(loss.item() - want.item()) < 20 * unit * want.item()


@pytest.mark.parametrize("main_grad", [None, torch.float64])
def test_padding_of_the_vocabulary_does_not_exist(model, main_grad):
    """The same weights under another padding, its rows full of 1000: equal losses and gradients, theirs 0."""
    shape, V = model.shape, model.shape.vocab_size
    batch = make_batch(shape)
    padded = make_model(make_shape("llama", tied=shape.tied, padded_vocab_size=96), main_grad=main_grad)
    tables = [padded.embedding.word] if padded.head is None else [padded.embedding.word, padded.head]
    with torch.no_grad():
        for table in tables:
            table.weight[V:] = 1000.0
    assert padded.logits(make_hidden(model)).shape[-1] == V
    want, got = run_loss(model, batch), run_loss(padded, batch)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    want.backward()
    got.backward()
    for table, plain in zip(tables, [model.embedding.word, model.head], strict=False):
        grad = table.weight.grad if main_grad is None else table.weight.main_grad
        torch.testing.assert_close(grad[:V], plain.weight.grad[:V])
        assert torch.equal(grad[V:], torch.zeros_like(grad[V:]))
    want_gradients, got_gradients = gradients(model), gradients(padded)
    for name in want_gradients.keys() - {"embedding.word.weight", "head.weight"}:
        torch.testing.assert_close(got_gradients[name], want_gradients[name])


def test_label_smoothing_counts_the_true_vocabulary():
    """Decision: smoothing must not change with the padding (Megatron's changes with tp)."""
    losses = []
    for padded in (53, 96):
        shape = make_shape("llama", padded_vocab_size=padded)
        model, batch = make_model(shape, label_smoothing=0.1), make_batch(shape)
        losses.append(run_loss(model, batch))
    assert torch.equal(*losses)
    assert not torch.isclose(losses[0], run_loss(make_model(shape), batch))
