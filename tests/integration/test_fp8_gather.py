"""Weights stored and gathered in fp8: the bits of a gather in 16, half the bytes, nobody reads too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.comm import Collectives, transport
from redline.config import Environment
from redline.formulas.traffic import data_parallel_collectives
from redline.run import OpenRun, open_run

from .ranks import merged, on_ranks, state_of
from .tiny import Values, opened, parsed, take_steps, valid_loss

FP8 = {
    "fp8_format": "hybrid", "hidden_size": 32, "micro_batch_size": 1, "global_batch_size": 8,
    "train_iters": 4, "use_distributed_optimizer": True, "ddp_bucket_size": 3000, "clip_grad": 0.0,
    "fp8_param_gather": False,
}  # fmt: skip
# Without clipping: a norm over buckets that are cut otherwise is rounded otherwise.
GATHER = {"fp8_param_gather": True}
RECIPES = {
    "delayed": {},
    "tensorwise": {"fp8_recipe": "tensorwise"},
    "kept": {"keep_fp8_transpose_cache": True},
}


def on_ranks_of(
    world_size: int, variants: dict[str, Values], seen: Callable[[OpenRun], Any]
) -> list[dict[str, Any]]:
    """What `seen` finds in the run of each variant, on every rank, all in one fork."""

    def work(environment: Environment) -> dict[str, Any]:
        found = {}
        for number, (name, values) in enumerate(variants.items()):
            run = open_run(parsed(values), replace(environment, attempt=number), lambda _: None)
            found[name] = seen(run)
            run.close()
        return found

    return on_ranks(world_size, work)


def trained(run: OpenRun) -> dict[str, Any]:
    steps = take_steps(run)
    run.state.optimizer.settle()
    return {"losses": [step.loss for step in steps], "state": state_of(run)}


def test_b046_gathered_in_fp8_the_bits_are_those_of_a_gather_in_16(tmp_path: Path) -> None:
    """Each value is rounded by itself, by one scale: also over microbatches, overlapped or late.

    Histories, scales, main parameters and moments too, so that the one goes on where the other ended.
    """
    late = {"overlap_param_gather": False}
    again = {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
    }  # fmt: skip
    variants: dict[str, Values] = {}
    for name, recipe in RECIPES.items():
        variants[name] = {**FP8, **recipe}
        variants[f"{name} gathered"] = {**FP8, **recipe, **GATHER}
    variants["delayed gathered late"] = {**FP8, **GATHER, **late}
    variants["delayed gathered recomputed"] = {**FP8, **GATHER, **again}
    variants["delayed cast in each pass"] = {**FP8, "parameter_transpose_cache": False}
    variants["delayed in fp8, not sharded"] = {**FP8, **GATHER, "use_distributed_optimizer": False}
    variants["delayed gathered, states away"] = {**FP8, **GATHER, "optimizer_cpu_offload": True}
    found = on_ranks_of(2, variants, trained)
    states = {name: merged([rank[name]["state"] for rank in found]) for name in variants}
    for name in variants:
        base = name.split()[0]
        for rank in found:
            assert rank[name]["losses"] == found[0][base]["losses"], name
        assert states[name].keys() == states[base].keys()
        for key, tensor in states[name].items():
            # A measured scale belongs to what was cast last: here to the next step's weights already.
            measured = base == "tensorwise" and key.startswith("fp8.scale/") and key.endswith(".w")
            assert measured or torch.equal(tensor, states[base][key]), (name, key)
    assert found[0]["delayed"]["losses"] == found[0]["kept"]["losses"] != found[0]["tensorwise"]["losses"]


def test_beside_tensor_parallel() -> None:
    """Two tp ranks, two dp ranks each: weights of a rank's own features, histories shared by all four."""
    tp = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "global_batch_size": 4}
    for recipe in ({}, {"fp8_recipe": "tensorwise"}):
        both = {"16": {**FP8, **tp, **recipe}, "8": {**FP8, **tp, **recipe, **GATHER}}
        for rank in on_ranks_of(4, both, lambda run: [step.loss for step in take_steps(run, 3)]):
            assert rank["8"] == rank["16"]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_gather_bytes_train_as_one_process(size: int, tmp_path: Path) -> None:
    """The run that gathers 16, and one process, to the rounding of sums.

    Two ranks' sums have one order, and so one set of bits. Four ranks' depend on where buckets end, which are
    cut otherwise where weights lie apart, in a byte each; then fp32 rounds at 6e-8 of the largest value.
    """
    many = on_ranks_of(size, {"16": FP8, "8": {**FP8, **GATHER}}, trained)
    held = {name: merged([rank[name]["state"] for rank in many]) for name in ("16", "8")}
    alone = trained(opened(tmp_path, {**FP8, **GATHER}))
    assert held["8"].keys() == held["16"].keys() == alone["state"].keys()
    assert all(rank["8"]["losses"] == many[0]["8"]["losses"] for rank in many)
    assert many[0]["8"]["losses"] == pytest.approx(many[0]["16"]["losses"], rel=0 if size == 2 else 1e-6)
    assert many[0]["8"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for key, tensor in held["8"].items():
        largest = tensor.abs().max().item()
        torch.testing.assert_close(tensor, held["16"][key], rtol=0, atol=1e-6 * largest * (size > 2), msg=key)
        if key.startswith("fp8.history/"):
            torch.testing.assert_close(tensor, alone["state"][key], rtol=0.05, atol=0, msg=key)


class _Deferred:
    """An all-gather that takes place when it is waited for: what is read before is what was there."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._send = send

    def wait(self) -> None:
        self._send().wait()


def test_b046_no_weight_is_cast_before_it_has_arrived() -> None:
    """Gathers at the last moment, of bf16 and of fp8 parameters, give the bits of gathers at once."""

    def seen(run: OpenRun) -> list[float]:
        return [step.loss for step in take_steps(run)]

    def work(environment: Environment) -> dict[str, list[float]]:
        found, at_once = {}, Collectives.all_gather

        def deferred(self: Collectives, tensor: Tensor) -> Any:
            return _Deferred(lambda: at_once(self, tensor))

        for number, (name, values) in enumerate({"16": FP8, "8": {**FP8, **GATHER}}.items()):
            for turn, gather in enumerate((at_once, deferred)):
                Collectives.all_gather = gather  # type: ignore[method-assign]
                run = open_run(
                    parsed(values), replace(environment, attempt=2 * number + turn), lambda _: None
                )
                found[f"{name} {turn}"] = seen(run)
                run.close()
        return found

    for rank in on_ranks(2, work):
        assert rank["16 0"] == rank["16 1"] == rank["8 0"] == rank["8 1"]


def test_a_weight_in_fp8_is_sent_as_a_byte_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent in a step is what the formula says, and half of what bf16 weights are."""
    sent: list[int] = []
    gather = transport._all_gather

    def counted(whole: Tensor, part: Tensor, **how: Any) -> Any:
        sent.append(whole.nbytes)
        return gather(whole, part, **how)

    def seen(run: OpenRun) -> tuple[list[int], list[int], int]:
        take_steps(run, 2)
        run.state.optimizer.settle()
        sent.clear()
        take_steps(run, 1)
        buffers = run.state.optimizer.buffers.buffers
        sizes = [end - start for buffer in buffers for start, end in buffer.buckets]
        items = [buffer.tensors["param"].element_size() for buffer in buffers for _ in buffer.buckets]
        planned = data_parallel_collectives(
            sizes, 2, sharded=True, instances=1, grad_bytes=4, param_bytes=items
        )
        in_fp8 = sum(
            buffer.tensors["param"].nbytes
            for buffer in buffers
            if buffer.tensors["param"].element_size() == 1
        )
        return sorted(sent), sorted(size for kind, size in planned if kind == "all_gather"), in_fp8

    monkeypatch.setattr(transport, "_all_gather", counted)
    for rank in on_ranks_of(2, {"8": {**FP8, **GATHER}, "16": FP8}, seen):
        assert rank["8"][0] == rank["8"][1] and rank["16"][0] == rank["16"][1]
        weights = 2 * (32 * 3 * 32 + 32 * 32 + 2 * 32 * 48)  # of two layers: qkv, proj, fc1, fc2
        assert rank["16"][2] == 0 and rank["8"][2] == pytest.approx(weights, abs=256)
        assert sum(rank["16"][0]) - sum(rank["8"][0]) == pytest.approx(weights, abs=512)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_one_rank_resumes_and_evaluates(recipe: str, train: Any) -> None:
    """Bit for bit through a checkpoint, an evaluation, a table; a checkpoint of either serves the other."""
    sharded = {"delayed": "--use-distributed-optimizer", "tensorwise": ""}[recipe]
    gather = f"--hidden-size 32 --fp8 --fp8-recipe {recipe} --clip-grad 0 {sharded}"
    whole = train("whole", f"{gather} --fp8-stats-interval 3")
    train("cut", f"{gather} --exit-interval 3 --eval-interval 1")
    assert train("there", f"{gather} --no-fp8-param-gather --load cut").losses == whole.losses[3:]
    assert train("cut", f"{gather} --load cut").losses == whole.losses


def test_the_plan_knows_what_is_held(tmp_path: Path) -> None:
    """No copy in 16 bits, and none beside the parameter; a transposed one where it is kept."""
    for more, beside in ({}, 0), ({"keep_fp8_transpose_cache": True}, 1):
        run = opened(tmp_path, {**FP8, **GATHER, **more})
        assert run.plan.fp8 is not None and run.state.fp8 is not None
        state, weights = run.plan.memory.fullest.state, run.plan.fp8.weights
        params = [buffer.tensors["param"] for buffer in run.state.optimizer.buffers.buffers]
        assert sum(param.nbytes for param in params) == pytest.approx(state["weights"], rel=0.01)
        assert state.get("fp8_copies", 0) == beside * weights
        kept = [cast for gemm in run.state.fp8.gemms.values() for cast in gemm.casts]  # type: ignore[union-attr]
        assert sum(each.nbytes for each in kept) == beside * weights
        assert {param.dtype for param in params} == {torch.bfloat16, torch.float8_e4m3fn}
    before = valid_loss(run).loss
    assert before == valid_loss(run).loss
