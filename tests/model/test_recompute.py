"""Recompute: the same bits with and without, nothing counted twice, and the selection of layers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import gradients, make_batch, make_dropout, make_model, make_shape, run_loss

from redline.comm import Group
from redline.formulas.recompute import MODULES, NOTHING, Recompute, full, selective
from redline.model import Ops, local_ops
from redline.model.recompute import _own_share, checkpoint

CHOICES = {
    **{name: selective([name]) for name in MODULES},
    "every module": selective(MODULES),
    "norm and activation": selective(["layernorm", "activation"]),
    "uniform 1": full("uniform", 1),
    "uniform 2 of 3": full("uniform", 2),
    "uniform 7 of 3": full("uniform", 7),
    "block 1": full("block", 1),
    "block 9 of 3": full("block", 9),
    "block 1, modules behind": Recompute(modules=frozenset(["mlp", "layernorm"]), unit=1, layers=1),
}
KINDS = ("gpt2", "llama", "qwen3", "limited", "sinks")


def trained(shape, recompute, dtype, *, main_grad=True, backend="auto", microbatches=2):
    """(losses, gradients) after a few microbatches, all forwards before all backwards."""
    model = (
        make_model(
            shape,
            dtype,
            main_grad=torch.float64 if dtype == torch.float64 else torch.float32,
            backend=backend,
        )
        if main_grad
        else make_model(shape, dtype, backend=backend)
    )
    model = rebuilt_with(model, shape, recompute, backend)
    batches = [make_batch(shape, seed=seed) for seed in range(microbatches)]
    losses = [
        run_loss(model, batch, make_dropout(shape, batch, iteration))
        for iteration, batch in enumerate(batches)
    ]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses], gradients(model)


def rebuilt_with(model, shape, recompute, backend):
    """The same parameters in a model that recomputes."""
    other = make_model(shape, model.dtype, backend=backend, recompute=recompute)
    for name, parameter in other.named_parameters():
        source = model.get_parameter(name)
        parameter.data = source.data
        if hasattr(source, "main_grad"):
            parameter.main_grad = source.main_grad
    return other


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_with_dropout_and_two_microbatches_in_flight(kind, choice):
    """B029: the masks of the recomputed forward are those of the loss; B032: units that do not divide."""
    shape = make_shape(kind, num_layers=3, hidden_dropout=0.1, attention_dropout=0.1)
    want = trained(shape, NOTHING, torch.float32)
    found = trained(shape, CHOICES[choice], torch.float32)
    assert found[0] == want[0]
    assert all(torch.equal(found[1][name], grad) for name, grad in want[1].items())


@pytest.mark.parametrize("choice", ["every module", "norm and activation", "uniform 2 of 3"])
def test_same_bits_in_bf16_without_main_gradients_and_with_flash(choice):
    shape = make_shape("llama", num_layers=3)
    for options in ({"main_grad": False, "microbatches": 1}, {"backend": "flash"}):
        want = trained(shape, NOTHING, torch.bfloat16, **options)
        found = trained(shape, CHOICES[choice], torch.bfloat16, **options)
        assert found[0] == want[0]
        assert all(torch.equal(found[1][name], grad) for name, grad in want[1].items())


@settings(max_examples=20, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(2, 4))
def test_the_ranks_shares_are_the_whole(size, ranks):
    """Also where the elements cannot be cut evenly; each is a copy, so that the whole can be freed."""
    x = torch.arange(math.prod(size), dtype=torch.float32).reshape(size)
    shares = [_own_share(x, Group(tuple(range(ranks)), index)) for index in range(ranks)]
    assert len({share.numel() for share in shares}) == 1
    assert torch.equal(torch.cat(shares)[: x.numel()].view(size), x)
    assert all(share.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for share in shares)


CALLS = {  # of the record's operations in one forward and backward of three layers of a Llama
    "nothing": {"linear": 12, "norm": 7, "activation": 3},
    "layernorm": {"linear": 12, "norm": 13, "activation": 3},
    "activation": {"linear": 12, "norm": 7, "activation": 6},
    "core_attn": {"linear": 12, "norm": 7, "activation": 3},
    "mlp": {"linear": 18, "norm": 10, "activation": 6},
    "every module": {"linear": 18, "norm": 13, "activation": 6},
    "uniform 2 of 3": {"linear": 24, "norm": 13, "activation": 6},
    "block 1": {"linear": 16, "norm": 9, "activation": 4},
}


@pytest.mark.parametrize("choice", CALLS)
def test_only_what_was_dropped_runs_again(choice):
    """Head and loss run once; evaluation runs nothing twice."""
    plain, calls = local_ops(), []

    def spied(name):
        def call(*args, **kwargs):
            calls.append(name)
            return getattr(plain, name)(*args, **kwargs)

        return call

    ops = Ops(**{name: spied(name) for name in Ops.__dataclass_fields__ if getattr(plain, name)})
    shape = make_shape("llama", num_layers=3)
    model = make_model(shape, ops=ops, recompute=CHOICES.get(choice, NOTHING))
    batch = make_batch(shape)
    run_loss(model, batch).backward()
    found = {name: calls.count(name) for name in ("linear", "norm", "activation")}
    found["linear"] += calls.count("row_linear")
    assert found == CALLS[choice] and calls.count("head_loss") == calls.count("embedding") == 1
    calls.clear()
    with torch.no_grad():
        run_loss(model, batch)
    assert calls.count("linear") + calls.count("row_linear") == 12 and calls.count("activation") == 3


def test_hooks_of_parameters_fire_once_a_backward():
    """Buckets of a data-parallel run count them."""
    shape = make_shape("llama", num_layers=3)
    model = make_model(shape, main_grad=torch.float64, recompute=full("uniform", 2))
    fired = dict.fromkeys(dict(model.named_parameters()), 0)

    def count(name, parameter):
        fired[name] += 1

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(count, name))
    run_loss(model, make_batch(shape)).backward()
    assert set(fired.values()) == {1}, fired


def test_parameters_learn_where_the_input_needs_no_gradient():
    weight = torch.ones(3, requires_grad=True)
    checkpoint(lambda x: x * weight, torch.arange(3.0)).sum().backward()
    assert weight.grad.tolist() == [0.0, 1.0, 2.0]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 40), st.integers(1, 45))
def test_units_are_megatrons(num_layers, count):
    """Uniform: units of N from the start, the last clipped. Block: the first N, each by itself."""
    uniform = [list(unit) for unit in full("uniform", count).units(num_layers)]
    layers = list(range(num_layers))
    assert uniform == [layers[first : first + count] for first in range(0, num_layers, count)]
    block = [list(unit) for unit in full("block", count).units(num_layers)]
    assert block == [[layer] for layer in layers[:count]]
    assert selective(["mlp"]).units(num_layers) == NOTHING.units(num_layers) == ()


@pytest.mark.parametrize(("layers", "group", "last"), [(24, 7, 3), (10, 3, 1)])
def test_a_unit_that_does_not_divide_the_layers(layers, group, last):
    """B032: works, the last unit shorter."""
    units = full("uniform", group).units(layers)
    assert len(units[-1]) == last and units[-1].stop == layers
