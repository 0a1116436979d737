"""A block whose norms hand on the residual stream: the same model in fewer passes over it.

In fp32 both add the same two numbers, so under the interpreter bits are equal; a GPU may contract the norm's
last product with the addition, which is one rounding of the two.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from model_cases import (
    gradients,
    make_batch,
    make_dropout,
    make_model,
    make_shape,
    run_loss,
    saved_tensors,
)
from torch.profiler import ProfilerActivity, profile

from redline.attention import MaskSpec, unfused_attention
from redline.comm import Group, linked_gemm
from redline.comm.collectives import Pending
from redline.formulas.operators import WITHOUT_LOGITS
from redline.formulas.recompute import NOTHING, Recompute, full
from redline.model import TensorParallel, fused_ops, parallel_gemm, tensor_parallel_ops
from redline.model.block import Block
from redline.model.rope import rope_table

SIZES = {"hidden": 32, "ffn": 40, "vocab_size": 61, "padded_vocab_size": 64}
BARE = {**SIZES, "bias_linear": False, "hidden_dropout": 0.0}
SHAPES = {
    "bare": make_shape("llama", **BARE),
    "bias": make_shape("llama", **{**BARE, "bias_linear": True}),
    "dropout": make_shape("llama", **{**BARE, "hidden_dropout": 0.1}),
    "q/k norm": make_shape("qwen3", **BARE),
}
OPS = {
    "apart": fused_ops(WITHOUT_LOGITS),
    "joined": fused_ops(WITHOUT_LOGITS | {"residual_norm"}),
}


def step(shape, ops, device, dtype=torch.float32, **options):
    """Loss and gradients of one microbatch."""
    model = make_model(shape, dtype, device, main_grad=torch.float32, backend="unfused", ops=ops, **options)
    batch = make_batch(shape, device=device)
    loss = run_loss(model, batch, make_dropout(shape, batch) if shape.hidden_dropout else None)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same(found, want, device):
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if device == "cuda" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, want, **tolerance)


@pytest.mark.parametrize("name", SHAPES)
def test_fp32_gives_the_bits_of_separate_kernels(name, kernel_device):
    runs = [step(SHAPES[name], ops, kernel_device) for ops in OPS.values()]
    assert runs[0][0] > 0
    assert_same(runs[1], runs[0], kernel_device)


def test_a_stream_in_fp32_under_bf16(kernel_device):
    """The stream's gradient stays wide; what the norm takes in is in bf16."""
    exact = step(SHAPES["bare"], None, kernel_device, torch.float64)
    errors = {}
    for name, ops in OPS.items():
        loss, grads = step(SHAPES["bare"], ops, kernel_device, torch.bfloat16, residual_dtype=torch.float32)
        assert loss.item() == pytest.approx(exact[0].item(), rel=0.02)
        errors[name] = sum((grads[key] - want).square().sum() for key, want in exact[1].items())
    assert errors["joined"] <= 1.1**2 * errors["apart"]


def test_whole_layers_are_recomputed(kernel_device):
    runs = [
        step(SHAPES["bare"], OPS["joined"], kernel_device, recompute=recompute)
        for recompute in (full("uniform", 1), full("uniform", 2))
    ]
    assert_same(runs[0], runs[1], kernel_device)
    assert_same(runs[0], step(SHAPES["bare"], OPS["apart"], kernel_device), kernel_device)


def test_attention_alone_is_recomputed(kernel_device):
    """The selective recompute that goes with it: what it drops lies between the two norms."""
    selective = Recompute(modules=frozenset({"core_attn", "activation"}))
    runs = [
        step(SHAPES["bare"], OPS["joined"], kernel_device, recompute=each) for each in (NOTHING, selective)
    ]
    assert_same(runs[1], runs[0], kernel_device)


def test_packed_documents(kernel_device):
    """Three documents in one row, positions counted anew in each: the bits of separate kernels."""
    shape, found = SHAPES["q/k norm"], []
    batch = make_batch(shape, B=1, S=12, device=kernel_device)
    starts = torch.tensor([0, 5, 6, 12], dtype=torch.int32, device=kernel_device)
    positions = torch.cat([torch.arange(n, device=kernel_device) for n in (5, 1, 6)])[None]
    for ops in OPS.values():
        model = make_model(
            shape, torch.float32, kernel_device, main_grad=torch.float32, backend="unfused", ops=ops
        )
        hidden = model(batch.tokens, positions, MaskSpec(cu_seqlens=starts, max_seqlen=6))
        loss = model.loss(hidden, batch.labels, batch.weights)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    assert found[0][1]["layers.0.mlp.norm.weight"].abs().sum() > 0
    assert_same(found[1], found[0], kernel_device)


def block_inputs(shape, device):
    x = torch.randn(11, 3, shape.hidden, device=device, requires_grad=True)
    return x, rope_table(shape, 11, torch.float32, torch.device(device))


def passes(shape, ops, device) -> dict[str, int]:
    """How often a block's forward and backward call what reads and writes the whole stream."""
    model = make_model(shape, torch.float32, device, main_grad=torch.float32, backend="flash", ops=ops)
    x, rope = block_inputs(shape, device)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model.layers[0](x, rope, MaskSpec(), None).sum().backward()
    counts = {event.key: event.count for event in seen.key_averages()}
    own = ("RMSNormFn", "AddRMSNormFn", "RMSNormFnBackward", "AddRMSNormFnBackward", "BiasDropoutAddFn")
    found = {name: counts.get(name, 0) for name in own}
    return {**found, "add": counts.get("aten::add", 0) + counts.get("aten::add_", 0)}


@pytest.mark.parametrize("name", ["bare", "bias"])
def test_passes_saved(name, kernel_device):
    """Two additions of autograd's a block, and where a branch ends bare, that of the forward between them."""
    apart, joined = (passes(SHAPES[name], ops, kernel_device) for ops in OPS.values())
    assert apart["add"] - joined["add"] == 2
    assert (apart["RMSNormFn"], apart["RMSNormFnBackward"], apart["AddRMSNormFn"]) == (2, 2, 0)
    assert (joined["AddRMSNormFn"], joined["AddRMSNormFnBackward"], joined["RMSNormFn"]) == (2, 2, 0)
    assert apart["BiasDropoutAddFn"] == 2
    assert joined["BiasDropoutAddFn"] == (1 if name == "bare" else 2)


@pytest.mark.parametrize("name", ["bare", "dropout"])
def test_as_much_is_saved(name, kernel_device):
    """What the formula says of a fused norm stays true: the stream once, and a number a row."""
    sizes = []
    for ops in OPS.values():
        shape = SHAPES[name]
        model = make_model(shape, torch.float32, kernel_device, main_grad=torch.float32, ops=ops)
        x, rope = block_inputs(shape, kernel_device)
        dropout = make_dropout(shape, make_batch(shape, device=kernel_device))
        state = dropout.layer(0) if shape.hidden_dropout else None
        run = partial(model.layers[0], x, rope, MaskSpec(), state)
        sizes.append(sum(each.num_bytes for each in saved_tensors(run, model.parameters())))
    assert sizes[0] == sizes[1] > 0


def test_it_compiles_without_a_graph_break(kernel_device):
    shape, found = SHAPES["bare"], []
    for compiled in (False, True):
        model = make_model(
            shape, torch.float32, kernel_device, main_grad=torch.float32, backend="unfused", ops=OPS["joined"]
        )
        torch.manual_seed(0)
        x, rope = block_inputs(shape, kernel_device)
        run = (
            torch.compile(model.layers[0], fullgraph=True, backend="aot_eager")
            if compiled
            else model.layers[0]
        )
        y = run(x, rope, MaskSpec(), None)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, gradients(model)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert found[0][2]["layers.0.mlp.norm.weight"].abs().sum() > 0


@pytest.mark.parametrize("sequence", [False, True])
def test_one_of_two_tensor_parallel_ranks(sequence, kernel_device, monkeypatch):
    """The norm lies between a sum over ranks and the next gather: a rank beside an imagined twin."""

    def gather(x, group):
        return torch.cat((x, x))

    def scatter(x, group):
        return 2 * x.chunk(2)[0]

    monkeypatch.setattr(parallel_gemm, "all_gather", gather)
    monkeypatch.setattr(parallel_gemm, "all_reduce", lambda x, group: 2 * x)
    monkeypatch.setattr(linked_gemm, "all_gather_async", lambda x, group: Pending(gather(x, group)))
    monkeypatch.setattr(linked_gemm, "reduce_scatter_async", lambda x, group: Pending(scatter(x, group)))
    monkeypatch.setattr(parallel_gemm, "all_reduce_async", lambda x, group: Pending(2 * x))
    monkeypatch.setattr(linked_gemm, "all_gather", gather)
    monkeypatch.setattr(linked_gemm, "reduce_scatter", scatter)
    tp, shape, found = TensorParallel(group=Group((0, 1), 0), sequence=sequence), SHAPES["bare"], []
    rope = rope_table(shape, 10, torch.float32, torch.device(kernel_device))
    for ops in OPS.values():
        block = Block(
            shape.of_rank(2),
            attention=unfused_attention,
            ops=tensor_parallel_ops(ops, tp),
            dtype=torch.float32,
        )
        block.to_empty(device=kernel_device)
        torch.manual_seed(0)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
            parameter.main_grad = torch.zeros_like(parameter)
        x = torch.randn(5 if sequence else 10, 3, shape.hidden, device=kernel_device, requires_grad=True)
        y = block(x, rope, MaskSpec(), None)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, [each.main_grad for each in block.parameters()]))
    assert found[0][1].abs().sum() > 0
    assert_same(found[1], found[0], kernel_device)
