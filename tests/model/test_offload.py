"""Activations in host memory: the same bits, whole storages once each, and nothing of parameters."""

from __future__ import annotations

import gc

import pytest
import torch
from model_cases import gradients, make_batch, make_dropout, make_model, make_shape, run_loss

from redline.formulas.recompute import NOTHING, full, selective
from redline.model import offload


@pytest.fixture(autouse=True)
def sums_in_one_order():
    """The plain embedding's gradient adds its rows on a GPU in any order, which differs from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS warns without a variable of its own
    yield
    torch.use_deterministic_algorithms(False)


def trained(shape, device, **options):
    """(losses, gradients) of two microbatches, both forwards before both backwards."""
    model = make_model(shape, torch.float32, device, main_grad=torch.float32, **options)
    batches = [make_batch(shape, seed=seed, device=device) for seed in range(2)]
    losses = [run_loss(model, batch, make_dropout(shape, batch)) for batch in batches]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses], gradients(model)


@pytest.mark.parametrize(
    "recompute", [NOTHING, full("uniform", 2), full("block", 1), selective(["layernorm", "activation"])]
)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_same_bits(kind, recompute, device, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 64)
    shape = make_shape(kind, num_layers=3, hidden_dropout=0.1, attention_dropout=0.1)
    want = trained(shape, device, recompute=recompute, backend="unfused")
    for layers in (1, 3):
        found = trained(shape, device, recompute=recompute, offload_layers=layers, backend="unfused")
        assert found[0] == want[0]
        assert all(torch.equal(found[1][name], grad) for name, grad in want[1].items())


def test_what_moves(monkeypatch):
    """Each storage once a layer, no parameter, and all of it is gone after backward."""
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 64)
    moved = []
    plain = offload._Moved.__init__

    def spy(self, tensor, stream):
        moved.append(tensor.untyped_storage().data_ptr())
        plain(self, tensor, stream)

    monkeypatch.setattr(offload._Moved, "__init__", spy)
    shape = make_shape("llama", num_layers=3)
    model = make_model(shape, torch.float32, main_grad=torch.float32, offload_layers=2)
    loss = run_loss(model, make_batch(shape))
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    assert moved and not parameters.intersection(moved)
    alive = sum(type(each) is offload._Moved for each in gc.get_objects())
    assert alive == len(moved)
    loss.backward()
    del loss
    gc.collect()
    assert not any(type(each) is offload._Moved for each in gc.get_objects())
    with torch.no_grad():
        moved.clear()
        run_loss(model, make_batch(shape))
    assert not moved


def test_two_layers_are_on_their_way_at_most(monkeypatch):
    """The third begins once the copies of the first are done: memory does not grow, however slow they are.

    Events are the numbers of the layers; what the device has waited for is `waited`.
    """
    waited, left = [], []

    class Stream:
        events = iter(range(9))

        def record_event(self):
            return next(self.events)

        def wait_event(self, event):
            waited.append(event)

    monkeypatch.setattr(offload, "_Moved", lambda tensor, stream: type("Moved", (), {})())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: left.append(self.numel()))
    for layers in (4, 3):
        moves = offload.Offload(layers, (), Stream())
        for index in range(4):
            with moves.layer(index):
                torch.ones(1 << 16, requires_grad=True).square()
            assert len(waited) == max(0, index - 1)
            assert all(len(layer.held) == 1 for layer in moves._leaving)
        moves.done()
        assert len(left) == layers - len(waited) and waited == sorted(waited)
        waited.clear(), left.clear()


def test_backward_asks_for_the_layer_before(monkeypatch):
    """The way back of layer i begins when layer i + 1 asks for its first tensor."""
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 64)
    order = []
    for name in ("start_back", "back"):
        plain = getattr(offload._Moved, name)

        def call(self, name=name, plain=plain):
            order.append((name, self))
            return plain(self)

        monkeypatch.setattr(offload._Moved, name, call)
    shape = make_shape("llama", num_layers=2)
    model = make_model(shape, torch.float32, main_grad=torch.float32, offload_layers=2)
    run_loss(model, make_batch(shape)).backward()
    first_wanted = {}
    for place, (name, moved) in enumerate(order):
        if name == "back":
            first_wanted.setdefault(moved, place)
    started = {}
    for place, (name, moved) in enumerate(order):
        if name == "start_back":
            started.setdefault(moved, place)
    early = [moved for moved in first_wanted if started[moved] < first_wanted[moved] - 1]
    assert len(early) >= len(first_wanted) // 3, "tensors of the earlier layer are on their way beforehand"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_holds_less_and_computes_the_same():
    """Of six layers, four away: after forward their bytes are free, and after backward no bit differs."""
    shape = make_shape("llama", num_layers=6, hidden=1024, ffn=2816, num_heads=8, head_dim=128)
    held, found = [], []
    for layers in (0, 4):
        model = make_model(
            shape,
            torch.bfloat16,
            "cuda",
            main_grad=torch.float32,
            backend="unfused",
            offload_layers=layers,
        )
        losses = []
        for seed in range(3):  # memory that copies have left is used again meanwhile
            batch = make_batch(shape, B=2, S=512, device="cuda", seed=seed)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = run_loss(model, batch)
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated() - before)
            loss.backward()
            losses.append(loss.item())
            del loss
        found.append((losses, gradients(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], grad) for name, grad in found[0][1].items())
    plain, away = max(held[:3]), max(held[3:])
    assert away < plain * (1 - 4 / 6) + 0.1 * plain  # what is left of six layers, with loss and batch
