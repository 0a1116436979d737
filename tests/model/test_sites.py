"""The seams: operations and sites are swapped by one value, and a model is freed when it is dropped."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields, replace

import pytest
import torch
from model_cases import make_batch, make_dropout, make_model, make_shape, run_loss

from redline.attention import unfused_attention
from redline.model import Ops, Transformer, local_ops
from redline.model.modules import Site

ALWAYS = {"embedding", "linear", "row_linear", "norm", "activation", "bias_dropout_add", "head_loss"}
USED = {
    "gpt2": ALWAYS | {"dropout"},
    "llama": ALWAYS | {"rope_qkv"},
    "qwen3": ALWAYS | {"qk_norm", "rope"},
}


@pytest.mark.parametrize("kind", list(USED))
def test_every_operation_is_called_through_the_record(kind):
    """A field that no model reads, or work that goes around the record, would not be seen by a swap."""
    plain, calls = local_ops(), []

    def spy(name: str):
        def call(*args, **kwargs):
            calls.append(name)
            return getattr(plain, name)(*args, **kwargs)

        return call

    shape = make_shape(kind, hidden_dropout=0.1 if kind == "gpt2" else 0.0)
    present = {field.name for field in fields(Ops)} - {"residual_norm"}  # it runs where it is asked for
    model = Transformer(
        shape,
        attention=unfused_attention,
        dtype=torch.float64,
        ops=Ops(**{name: spy(name) for name in present}),
    )
    source = make_model(shape)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    batch = make_batch(shape)
    losses = [run_loss(each, batch, make_dropout(shape, batch)) for each in (model, source)]
    torch.testing.assert_close(*losses)
    assert set(calls) == USED[kind]
    assert calls.count("linear") == calls.count("row_linear") == 2 * shape.num_layers
    assert calls.count("norm") == 2 * shape.num_layers + 1
    assert set().union(*USED.values()) == present


@pytest.mark.parametrize(
    "name", ["attention.qkv_site", "attention.proj_site", "mlp.fc1_site", "mlp.fc2_site"]
)
def test_a_site_is_replaced_by_one_assignment(name):
    """What replaces a Site gets its input, and owns prologue and GEMM."""
    shape = make_shape("llama")
    model, batch = make_model(shape), make_batch(shape)
    want = run_loss(model, batch)
    module, attribute = name.split(".")
    owner = getattr(model.layers[0], module)
    site: Site = getattr(owner, attribute)
    seen = []

    def replacement(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        prepared = x if site.prologue is None else site.prologue(x)
        return prepared @ site.gemm.weight.T

    setattr(owner, attribute, replacement)
    torch.testing.assert_close(run_loss(model, batch), want)
    sizes = {
        "qkv_site": shape.hidden,
        "proj_site": shape.q_size,
        "fc1_site": shape.hidden,
        "fc2_site": shape.fc1_size,
    }
    assert seen == [(11, 3, sizes[attribute])]
    doubled = replace(site, gemm=lambda x: 2 * site.gemm(x))
    setattr(owner, attribute, doubled)
    assert not torch.isclose(run_loss(model, batch), want)


def test_a_dropped_model_frees_its_memory_at_once():
    """Without a cycle of references: a GPU's memory must not wait for the garbage collector."""
    gc.disable()
    try:
        model = make_model(make_shape("gpt2"))
        watched = weakref.ref(model.layers[0].mlp.fc1.weight)
        del model
        assert watched() is None
    finally:
        gc.enable()
