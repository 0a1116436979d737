"""Compiled blocks: one graph for all layers, no break, the results and the saved tensors of eager blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
from torch import nn
from torch._dynamo.utils import counters

from redline.attention import MaskSpec
from redline.build import CompileLog, compile, compile_blocks, compile_failure_explained
from redline.build.nested_tags import mark_inside
from redline.config import Environment
from redline.errors import ConfigError, TrainingError
from redline.formulas.activations import MicrobatchShape, saved_by_layer, total_bytes
from redline.formulas.recompute import MODULES, NOTHING, Recompute, selective
from redline.formulas.shape import ModelShape
from redline.model import Ops, Transformer, fused_ops
from redline.model.rope import rope_table

LAYERS = 3
DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(cache_dir=tmp_path)


def compiled(
    model: Transformer, environment: Environment, monkeypatch: pytest.MonkeyPatch, backend: str = "aot_eager"
) -> CompileLog:
    """Have a model's blocks compiled, without the time that code takes to make."""
    monkeypatch.setattr(compile, "BACKEND", backend)
    monkeypatch.setenv(compile.CACHE_VARIABLE, str(environment.cache_dir))
    device = model.embedding.word.weight.device.type
    return compile_blocks(model.layers, device, lambda _: None, environment=environment)[0]


def twins(
    shape: ModelShape,
    dtype: torch.dtype,
    device: str,
    ops: Ops | None = None,
    recompute: Recompute = NOTHING,
    backend: str = "auto",
) -> list[Transformer]:
    """Two equal models, the second with `recompute`; main_grads are views of one buffer, as in a run."""
    models = [
        make_model(shape, dtype, device, ops=ops, backend=backend, recompute=choice)
        for choice in (NOTHING, recompute)
    ]
    for model in models:
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=dtype, device=device)
        for parameter in model.parameters():
            parameter.main_grad, flat = (
                flat[: parameter.numel()].view_as(parameter),
                flat[parameter.numel() :],
            )
    return models


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "kind", ["gpt2", "qwen3", "sinks", pytest.param("neox", marks=LONG), pytest.param("geglu", marks=LONG)]
)
def test_layers_share_one_graph_and_give_the_bits_of_eager(
    kind: str, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over steps, layers, two microbatches in flight, dropout, a tail batch and evaluation.

    With a backend that runs the captured operators one by one, every bit must be that of the eager model.
    """
    shape = make_shape(kind, num_layers=LAYERS, **DROPS)
    eager, model = twins(shape, torch.float64, "cpu")
    log = compiled(model, environment, monkeypatch)
    for iteration in range(3):
        for each in (eager, model):
            losses = []
            for seed in range(2):  # both forwards before the first backward
                batch = make_batch(shape, seed=10 * iteration + seed)
                losses.append(run_loss(each, batch, make_dropout(shape, batch, iteration)))
            for loss in losses:
                loss.backward()
        assert len(log.graphs) == 1
        found, wanted = gradients(model), gradients(eager)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    batch = make_batch(shape)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(run_loss(model, batch), run_loss(eager, batch))
    assert [training for training, _ in log.graphs] == [True, False]
    tail = batch[slice(1)]
    with torch.no_grad():
        assert torch.equal(run_loss(model, tail), run_loss(eager, tail))
    assert len(log.graphs) == 3, "fixed sizes: another batch size is another graph, once"
    assert not counters["graph_break"]


def test_one_row_is_one_graph_too(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size of 1 has any stride: that of the embedding's output must be that of a block's."""
    shape = make_shape("gpt2", num_layers=LAYERS, **DROPS)
    eager, model = twins(shape, torch.float64, "cpu")
    log = compiled(model, environment, monkeypatch)
    batch = make_batch(shape, B=1)
    losses = [run_loss(each, batch, make_dropout(shape, batch)) for each in (eager, model)]
    assert torch.equal(*losses) and len(log.graphs) == 1


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("gpt2", "layernorm activation"),
        ("qwen3", ""),
        *(
            pytest.param(*each, marks=LONG)
            for each in (("gpt2", ""), ("gpt2", "mlp"), ("qwen3", "core_attn layernorm"))
        ),
    ],
)
def test_kernels_are_nodes_of_the_graph(
    kind: str, modules: str, kernel_device: str, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with Redline's kernels: no break at an operator, no copy of a main_grad it adds to."""
    shape = make_shape(kind, num_layers=2, hidden_dropout=0.1, attention_dropout=0.0)
    choice = selective(modules.split())
    backend = "unfused" if choice.drops("core_attn") else "auto"  # the plan keeps it of PyTorch's kernels
    eager, model = twins(shape, torch.float32, kernel_device, fused_ops(), choice, backend)
    log = compiled(model, environment, monkeypatch)
    batch = make_batch(shape, B=2, S=5, device=kernel_device)
    for each in (eager, model):
        run_loss(each, batch, make_dropout(shape, batch)).backward()
    found, wanted = gradients(model), gradients(eager)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(log.graphs) == 1 and not counters["graph_break"]


CHOICES = [["core_attn", "layernorm", "activation"], ["mlp"], *([name] for name in MODULES[:3]), MODULES]


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        pytest.param(kind, modules, marks=[] if kind == "gpt2" and index < 2 else LONG, id=f"{kind}-{index}")
        for kind in ("gpt2", "qwen3", "geglu", "neox")
        for index, modules in enumerate(CHOICES)
    ],
)
def test_modules_are_dropped_and_made_again(
    kind: str, modules: list[str], environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of blocks that keep everything, B029's dropout included, and no more bytes than formulas say.

    Those leave out vectors. A compiled block also keeps what layers share, angles and keys of dropout, and
    under PyTorch 2.11 the counters of a plain dropout's mask. Any activation is larger than all these.
    """
    shape = make_shape(kind, num_layers=LAYERS, **DROPS)
    eager, model = twins(shape, torch.float64, "cpu", None, selective(modules), "unfused")
    log = compiled(model, environment, monkeypatch)
    batch = make_batch(shape, B=2)
    dropout = make_dropout(shape, batch)
    for each in (eager, model):
        losses = [run_loss(each, batch, make_dropout(shape, batch, iteration)) for iteration in range(2)]
        for loss in losses:
            loss.backward()
    found, wanted = gradients(model), gradients(eager)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    x_SBH = torch.randn(11, 2, shape.hidden, dtype=torch.float64, requires_grad=True)
    rope = rope_table(shape, 11, torch.float64, x_SBH.device)
    kept = []
    for each in (eager, model):
        run = partial(each.layers[1], x_SBH, rope, MaskSpec(), dropout.layer(1))
        kept.append(sum(item.num_bytes for item in saved_tensors(run, each.parameters())))
    assert len(log.graphs) == 1 and not counters["graph_break"], "saved by the graph that has trained"
    sizes: dict[str, Any] = {"seq_length": 11, "micro_batch_size": 2, "dtype": "fp64", "device": "cpu"}
    micro = MicrobatchShape(**sizes, attention="unfused", grad_dtype="fp64", recompute=selective(modules))
    shared = [dropout.keys, dropout.iteration, dropout.sample_index_B]
    shared += [] if rope is None else [rope.cos_SP, rope.sin_SP]
    left_out = 8 * 4 * (shape.hidden + shape.head_dim) + sum(each.nbytes for each in shared)
    left_out += 8 * 11 * ((2 + 1) * shape.hidden // 4 + 1)  # counters: a sample's, a row's, a place
    assert kept[1] - total_bytes(saved_by_layer(shape, micro)) <= left_out < kept[0] - kept[1]


@pytest.mark.parametrize(
    "modules", [["core_attn", "layernorm", "activation"], pytest.param(["mlp"], marks=LONG)]
)
def test_modules_behind_whole_layers(
    modules: list[str], environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `--recompute auto` may take: a graph for each kind of layer, and one for all to evaluate."""
    shape = make_shape("gpt2", num_layers=2, **DROPS)
    choices = NOTHING, replace(selective(modules), unit=1, layers=1)
    eager, model = (make_model(shape, backend="unfused", recompute=choice) for choice in choices)
    log = compiled(model, environment, monkeypatch, "eager")
    batch = make_batch(shape)
    for each in (eager, model):
        run_loss(each, batch, make_dropout(shape, batch)).backward()
    found, wanted = gradients(model), gradients(eager)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with torch.no_grad():
        assert torch.equal(run_loss(model, batch), run_loss(eager, batch))
    unrecorded, marked, plain, evaluation = False, True, True, False
    assert [training for training, _ in log.graphs] == [unrecorded, marked, plain, evaluation]


@pytest.mark.long
@pytest.mark.parametrize("modules", [("core_attn", "layernorm", "activation"), ("mlp",)])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_real_code_gives_the_same_bits_with_and_without(
    kind: str, modules: tuple[str, ...], environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler itself, which joins what is repeated with what reads it.

    In 16 bits it may leave out a rounding where it joins, so there the last bits of plain operations differ.
    """
    if reason := compile.why_not("cpu"):
        pytest.skip(reason)
    shape = make_shape(kind, num_layers=LAYERS, **DROPS)
    models = twins(shape, torch.float32, "cpu", None, selective(modules), "unfused")
    batch = make_batch(shape)
    for model in models:
        torch._dynamo.reset()
        compiled(model, environment, monkeypatch, "inductor")
        run_loss(model, batch, make_dropout(shape, batch)).backward()
    wanted, found = map(gradients, models)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("implementation", "modules"),
    [
        ("local", ""),
        ("fused", "layernorm activation"),
        *(pytest.param(*each, marks=LONG) for each in (("fused", ""), ("fused", "mlp"), ("local", "mlp"))),
    ],
)
def test_saved_tensors_are_those_of_the_sites(
    implementation: str,
    modules: str,
    kernel_device: str,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The partitioner of the real compiler may keep less than the plain operations do, never more.

    Of a block of kernels it keeps exactly what the sites keep, which is what formulas/memory counts (the
    eager block is held to the formulas in tests/formulas).
    """
    fused = implementation == "fused"
    device = kernel_device if fused else "cpu"
    shape = make_shape("qwen3", num_layers=2, hidden=32, ffn=48)
    ops, choice = fused_ops() if fused else None, selective(modules.split())
    model = twins(shape, torch.float32, device, ops, choice)[1]
    eager = make_model(shape, torch.float32, device, ops=ops, recompute=choice)
    compiled(model, environment, monkeypatch, "aot_eager_decomp_partition")
    x_SBH = torch.randn(6, 2, shape.hidden, device=device, requires_grad=True)
    rope = rope_table(shape, 6, torch.float32, x_SBH.device)
    kept = []
    for each in (eager, model):
        layer = each.layers[1]
        layer(x_SBH, rope, MaskSpec(), None)  # compiles
        saved = saved_tensors(lambda layer=layer: layer(x_SBH, rope, MaskSpec(), None), each.parameters())
        kept.append(sum(item.num_bytes for item in saved))
    assert kept[1] == kept[0] if fused else 0 < kept[1] <= kept[0]


def test_bf16_with_wide_main_grads(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtypes of a real run: what is added to main_grad in fp32 stays in fp32."""
    shape = make_shape("llama", num_layers=LAYERS)
    eager = make_model(shape, torch.bfloat16, main_grad=torch.float32)
    model = make_model(shape, torch.bfloat16, main_grad=torch.float32)
    compiled(model, environment, monkeypatch)
    for each in (eager, model):
        run_loss(each, make_batch(shape)).backward()
    found, wanted = gradients(model), gradients(eager)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_no_compiler_is_said_before_the_first_step(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    model = make_model(make_shape("llama"))
    with pytest.raises(ConfigError, match="--use-torch-compile") as raised:
        compile_blocks(model.layers, "cpu", print, environment=environment)
    assert "C++ compiler" in raised.value.why and raised.value.mend


def test_a_failing_compilation_is_an_error_with_its_reason(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a silent fall back to eager."""

    def broken(graph: torch.fx.GraphModule, inputs: list[object]) -> None:
        raise ValueError("no code for this graph")

    monkeypatch.setattr(compile, "announced", lambda *_: broken)
    shape = make_shape("llama")
    model = make_model(shape)
    compiled(model, environment, monkeypatch)
    with pytest.raises(TrainingError) as raised, compile_failure_explained():
        run_loss(model, make_batch(shape))
    assert raised.value.why == "ValueError: no code for this graph."


def test_a_graph_break_is_an_error(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def prints(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    shape = make_shape("llama")
    model = make_model(shape)
    model.layers[0].mlp.forward = prints
    compiled(model, environment, monkeypatch)
    with pytest.raises(TrainingError, match="could not be compiled"), compile_failure_explained():
        run_loss(model, make_batch(shape))


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), compile_failure_explained():
        _ = 1 / 0


def test_marks_reach_into_functions() -> None:
    """PyTorch 2.11 marks a Function's node alone; the graph of its forward is what the partitioner reads."""
    tail = torch.fx.symbolic_trace(lambda x: x.sin())
    backward = torch.fx.symbolic_trace(lambda x: x.cos())
    inside, outside = torch.fx.Graph(), torch.fx.Graph()
    root = nn.Module()
    root.tail, root.backward = tail, backward
    for graph in (inside, outside):
        x = graph.placeholder("x")
        function = graph.get_attr("tail"), graph.get_attr("backward")
        node = graph.call_function(torch.ops.higher_order.autograd_function_apply, (*function, x))
        graph.output(graph.call_function(torch.neg, (node,)))
        if graph is inside:
            node.meta |= {"recompute": "again", "ac_graph_id": 3}
    mark_inside(torch.fx.GraphModule(root, outside))
    assert not any("recompute" in node.meta for node in tail.graph.nodes)
    mark_inside(torch.fx.GraphModule(root, inside))
    assert all(node.meta["ac_graph_id"] == 3 for node in tail.graph.nodes)
    assert not any("recompute" in node.meta for node in backward.graph.nodes), "it runs once"
