"""Tensor and sequence parallelism change no number: losses, norms and parameters are those of one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from redline.build import compile
from redline.comm import close_world
from redline.formulas.buckets import ALIGNMENT
from redline.formulas.memory import activation_table
from redline.formulas.params import stored_elements
from redline.formulas.tp_traffic import tp_of_microbatch, tp_of_step
from redline.model import shared_parameters
from redline.run import open_run, train_opened
from redline.step.forward import microbatch_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "formulas"))

from live_memory import LiveMemory

from .collectives import counted
from .layouts import GPT, LLAMA, assert_equal, train_all
from .ranks import on_ranks
from .tiny import parsed, take_steps


def tp(size: int, **given: object) -> dict[str, object]:
    return {"tensor_model_parallel_size": size, **given}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory):
    """What one process sees of a model, trained once."""
    cache, seen = tmp_path_factory.mktemp("cache"), {}

    def ask(values):
        key = repr(sorted(values.items()))
        if key not in seen:
            seen[key] = train_all(1, [values], cache)[0][0]
        return seen[key]

    return ask


def check(one, tmp_path: Path, world_size: int, variants) -> None:
    """Each (model, layout) beside the model on one process."""
    seen = train_all(world_size, [{**model, **layout} for model, layout in variants], tmp_path)
    for each, (model, _) in zip(seen, variants, strict=True):
        assert_equal(each, one(model))


SP = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
SPREAD = {"distribute_saved_activations": True}
# Norms of queries and keys, and attention sinks, of which each rank holds those of its heads.
QWEN = {**LLAMA, "qk_layernorm": True, "softmax_type": "learnable", "decoupled_lr": 1e-3}
# One group of keys and values, which all ranks hold; positions, biases and norms in every place.
SHARED = {**GPT, "group_query_attention": True, "num_query_groups": 1, "qk_layernorm": True}


def test_two_ranks(one, tmp_path: Path) -> None:
    """GPT (dropout, biases, LayerNorm, tied) and Llama (GQA, SwiGLU, RMSNorm, untied), accumulating.

    B053: under sequence parallelism norms have the same gradients on both ranks.
    """
    layouts = [(model, tp(2, **sp)) for model in (GPT, LLAMA) for sp in ({}, SP)]
    z_loss = {**LLAMA, "z_loss": 0.02}
    check(one, tmp_path, 2, [*layouts, (QWEN, tp(2)), (SHARED, tp(2, **SP)), (z_loss, tp(2, **SP))])


def test_zeros_among_gradients_are_those_of_the_model(tmp_path: Path) -> None:
    """Rows that pad the vocabulary, more of them on two ranks, are no parameters."""

    def zeros(size: int):
        def work(environment):
            run = open_run(parsed({**GPT, **tp(size), "log_num_zeros_in_grad": True}), environment, print)
            return [outcome.result.num_zeros for outcome in take_steps(run, 2)]

        return on_ranks(size, work)[0]

    assert zeros(1) == zeros(2)


def test_recompute(one, tmp_path: Path) -> None:
    """Collectives inside a part that runs again run again too: on all ranks alike."""
    modules = ("core_attn", "layernorm", "activation")
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    check(one, tmp_path, 2, [(GPT, tp(2, **FULL, **SP)), (LLAMA, tp(2, **selective, **SP))])


def test_spread_inputs_change_no_bit(one, tmp_path: Path) -> None:
    """`--distribute-saved-activations`: the run of two ranks with and without, dropout and offload included.

    Block of one layer and units of two: what is gathered is whole again, whatever its place and shape.
    """
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    offload = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
    narrow = {"fp64": False, "bf16": True}
    short = {"train_iters": 3}
    models = [
        {**GPT, **FULL},
        {**LLAMA, **block, **narrow, **short, "packing": True},
        {**GPT, **FULL, **offload, **short},
    ]
    variants = [{**model, **tp(2), **more} for model in models for more in ({}, SPREAD)]
    seen = train_all(2, variants, tmp_path)
    for plain, spread in zip(seen[::2], seen[1::2], strict=True):
        for before, after in zip(plain, spread, strict=True):
            assert after.losses == before.losses and after.grad_norms == before.grad_norms
            assert all(
                np.array_equal(piece, before.pieces[name][1]) for name, (_, piece) in after.pieces.items()
            )
    assert_equal(seen[1], one(GPT))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(backend: str, one, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank compiles its blocks whole, collectives with them (aot_eager: operators run one by one).

    What is dropped of a block is made again, with the collectives in it.
    """
    if backend == "inductor" and (reason := compile.why_not("cpu")):
        pytest.skip(reason)
    monkeypatch.setattr(compile, "BACKEND", backend)
    monkeypatch.setattr(compile, "why_not", lambda device_type: None)
    short = {"use_torch_compile": True, "train_iters": 2}
    models = [{**model, "train_iters": 2} for model in (QWEN, GPT)]
    modules = ("mlp",), ("core_attn", "layernorm", "activation")
    layouts = [
        tp(2, recompute_granularity="selective", recompute_modules=each, **sp)
        for each, sp in zip(modules, ({}, SP), strict=True)
    ]
    seen = train_all(2, [{**m, **each, **short} for m, each in zip(models, layouts, strict=True)], tmp_path)
    for each, model in zip(seen, models, strict=True):
        assert_equal(each, one(model))


def test_packed_documents(one, tmp_path: Path) -> None:
    """Every rank holds all starts of documents, and with sequence parallelism a share of the places."""
    packed = [({**GPT, "packing": True}, tp(2)), ({**LLAMA, "packing": True}, tp(2, **SP))]
    check(one, tmp_path, 2, packed)


@pytest.mark.long
def test_more_on_two_ranks(one, tmp_path: Path) -> None:
    variants = [(model, tp(2, **sp)) for model, sp in ((QWEN, SP), (SHARED, {}))]
    apart = {"gradient_accumulation_fusion": False}
    check(one, tmp_path, 2, [*variants, ({**GPT, **apart}, tp(2, **SP)), ({**LLAMA, **apart}, tp(2))])


@pytest.mark.long
def test_four_ranks(one, tmp_path: Path) -> None:
    """tp 4, and tp 2 beside dp 2."""
    variants = [(model, tp(size, **sp)) for model in (GPT, QWEN) for size in (2, 4) for sp in ({}, SP)]
    check(one, tmp_path, 4, [*variants, (SHARED, tp(4)), (SHARED, tp(4, **SP)), (SHARED, tp(2, **SP))])


def resumed(values, folder: Path):
    """Three more steps after those saved in `folder`."""
    return {**values, "load": str(folder), "train_iters": 6}


def save_after_three_steps(world_size: int, values, folder: Path) -> None:
    def work(environment):
        options = parsed({**values, "save": str(folder), "exit_interval": 3})
        return train_opened(open_run(options, environment, lambda _: None), 0.0) is None

    on_ranks(world_size, work)


@pytest.mark.parametrize("sizes", [(2, (1,)), pytest.param((2, (4, 2)), marks=pytest.mark.long),
                                   pytest.param((4, (1, 2)), marks=pytest.mark.long)])  # fmt: skip
def test_b106_a_checkpoint_loads_under_another_size(sizes, one, tmp_path: Path) -> None:
    """Saved by ranks that share the model, gone on by more, fewer or one: the straight run's numbers."""
    saved_by, loaded_by = sizes
    model = {**QWEN, "train_iters": 6}
    save_after_three_steps(saved_by, {**model, **tp(saved_by)}, tmp_path / "run")
    straight = one(model)
    for size in loaded_by:
        values = {**resumed(model, tmp_path / "run"), **tp(size)}
        (seen,) = train_all(size, [values], tmp_path / "cache")
        np.testing.assert_allclose(seen[0].losses, straight.losses[3:], rtol=1e-10)
        assert_equal(seen, replace(straight, losses=straight.losses[3:], grad_norms=straight.grad_norms[3:]))


OVERLAP = {**SP, "tp_comm_overlap": True}
FP8_MODEL = {
    **LLAMA, "fp64": False, "fp8_format": "hybrid", "hidden_size": 32, "ffn_hidden_size": 64,
    "fp8_keep_bf16": ("layers.0.mlp.fc1",), **SP, "num_query_groups": 4, "global_batch_size": 2,
}  # fmt: skip


def test_overlap(one, tmp_path: Path) -> None:
    """Pieces that travel while others are multiplied change no number, dropout and accumulation included."""
    variants = [
        (GPT, tp(2, **OVERLAP)),
        (LLAMA, tp(2, **OVERLAP, tp_comm_overlap_method="chunked", tp_comm_overlap_chunks=3)),
        (LLAMA, tp(2, **OVERLAP, tp_comm_overlap_rs_dgrad=True, tp_comm_bulk_wgrad=False)),
        (GPT, tp(2, **OVERLAP, tp_comm_overlap_ag=False, tp_comm_bulk_dgrad=False)),
    ]
    check(one, tmp_path, 2, variants)


@pytest.mark.long
def test_overlap_on_four_ranks(one, tmp_path: Path) -> None:
    pieces = {"tp_comm_overlap_method": "chunked", "tp_comm_overlap_chunks": 4}
    check(
        one,
        tmp_path,
        4,
        [(GPT, tp(4, **OVERLAP)), (LLAMA, tp(2, **OVERLAP)), (QWEN, tp(4, **OVERLAP, **pieces))],
    )


def sent(values, world_size: int, folder: Path):
    """(formula, counted) of one step on each rank: {kind: (collectives, bytes a rank sends)}."""

    def work(environment):
        run = open_run(parsed(values), replace(environment, cache_dir=folder), lambda _: None)
        if run.plan.fp8 is not None:
            take_steps(run, 1)  # in which operands are measured by every recipe
        with counted(run.groups.tp.size) as found:
            (outcome,) = take_steps(run, 1)
        microbatch = tp_of_microbatch(
            run.plan.shape, run.plan.microbatch, sequence=run.state.model.tp.sequence
        )
        shared = shared_parameters(
            run.plan.shape, run.state.model.tp.rank, sequence=run.state.model.tp.sequence
        )
        partial = sum(each.size for each in shared.values())
        step = tp_of_step(partial, run.plan.dtypes.grad, len(run.plan.microbatch.fp8_sites))
        number = outcome.num_samples // run.config.train.micro_batch_size
        wanted: dict[str, tuple[int, float]] = {}
        for times, each in [*((number, each) for each in microbatch), *((1, each) for each in step)]:
            count, size = wanted.get(each.kind, (0, 0.0))
            wanted[each.kind] = count + times * each.times, size + times * each.by_rank(run.groups.tp.size)
        return wanted, dict(found)

    return on_ranks(world_size, work)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_and_their_bytes_are_those_of_the_formula(
    size: int, sequence: bool, tmp_path: Path
) -> None:
    for wanted, found in sent({**QWEN, **tp(size, sequence_parallel=sequence)}, size, tmp_path):
        assert found == wanted


def test_recomputed_collectives_are_those_of_the_formula(tmp_path: Path) -> None:
    """Units of two with their inputs spread, a block with sequence parallelism, the MLP alone."""
    mlp = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")}
    block = {**FULL, "recompute_method": "block", "recompute_num_layers": 1}
    for more in ({**FULL, **SPREAD}, {**block, **SP}, mlp, {**mlp, **SP}):
        for wanted, found in sent({**LLAMA, "num_layers": 3, **tp(2), **more}, 2, tmp_path):
            assert found == wanted, more


@pytest.mark.parametrize("model", [LLAMA, FP8_MODEL], ids=["16 bits", "fp8"])
def test_pieces_carry_the_same_bytes(model, tmp_path: Path) -> None:
    for wanted, found in sent({**model, **tp(2, **OVERLAP)}, 2, tmp_path):
        assert sum(size for _, size in found.values()) == sum(size for _, size in wanted.values())
        assert found["send"][0] > 0 and found["reduce_scatter"][0] > wanted["reduce_scatter"][0]


def test_bytes_of_rows_in_fp8(tmp_path: Path) -> None:
    """A byte a value where rows travel in fp8, two where they do not; measured scales; what runs again.

    Of a column GEMM in fp8 what was gathered is kept, unless its norm is dropped, or its rows travel in fp8.
    """
    norms = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")}
    block = {**FULL, "recompute_method": "block", "recompute_num_layers": 1}
    joined = {"tp_comm_overlap": True, "tp_comm_overlap_method": "plain"}
    gathered = []
    for more in ({}, norms, joined, {**joined, **norms}, {**joined, **block, "fp8_recipe": "tensorwise"},
                 {**joined, **norms, "fp8_recipe": "tensorwise"}):  # fmt: skip
        for wanted, found in sent({**FP8_MODEL, **tp(2), **more}, 2, tmp_path):
            assert found == wanted, more
            gathered.append(found["all_gather"][1])
    assert gathered[4] < gathered[0], "a column's rows travel twice, at half the bytes; a row's once"


@pytest.mark.parametrize("more", [{}, SP, {**FULL, **SPREAD}], ids=["tp", "sp", "spread"])
def test_activations_are_those_of_the_formula(more, tmp_path: Path) -> None:
    """Bytes that forward leaves behind on a rank, within 3 %: vectors of the hidden size are not counted.

    The peak of forward and backward within 6 %, as on one process.
    """
    wide = {"seq_length": 64, "hidden_size": 64, "ffn_hidden_size": 160, "micro_batch_size": 2}
    values = [{**model, **wide, **tp(2), **more} for model in (GPT, LLAMA)]

    def work(environment):
        return [_saved(each, replace(environment, attempt=number), tmp_path)
                for number, each in enumerate(values)]  # fmt: skip

    for rank in on_ranks(2, work):
        for (saved, peak), (predicted, predicted_peak) in rank:
            assert saved == pytest.approx(predicted, rel=0.03)
            assert peak == pytest.approx(predicted_peak, rel=0.06)


def _saved(values, environment, cache: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """(saved, peak) as they are, and as predicted."""
    run = open_run(parsed(values), replace(environment, cache_dir=cache), lambda _: None)
    step, model = run.make_step(), run.state.model
    stored = sum(flat.numel() for flat in run.state.optimizer.buffers.flat("param"))
    assert stored == stored_elements(run.plan.shape, ALIGNMENT, 2)
    batches = run.batches()
    (batch, *_) = next(batches)
    batches.close()
    dropout = step._dropout(batch, torch.tensor(0))
    params = list(model.parameters())
    inputs = [batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.positions_BS, batch.sample_index_B]
    with LiveMemory([*params, *(param.main_grad for param in params), *inputs]) as live:
        loss = microbatch_loss(model, batch, torch.ones((), dtype=torch.float64), dropout)
        saved = live.now
        loss.backward()
    del loss
    close_world()
    table = activation_table(run.plan.shape, run.plan.microbatch)
    predicted = sum(times * held.num_bytes for times, held in table if held.site != "batch")
    memory = run.plan.memory.fullest
    return (saved, live.peak), (predicted, memory.total - sum(memory.state.values()))
