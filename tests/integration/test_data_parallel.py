"""Every way of sharing data-parallel work trains as one process does.

In float64, parameters and losses agree to 1e-10 after ten steps: AdamW divides by the square root of the
second moment, which for a gradient near zero magnifies what the order of addition leaves by some orders.
Where only the time of sending differs, or who holds what, nothing may differ at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.build import compile
from redline.config import Environment
from redline.run import OpenRun, open_run
from redline.run.batches import eval_batches
from redline.step import evaluate

from .ranks import merged, on_ranks, state_of
from .tiny import opened, parsed, take_steps

STEPS = 10
BASE = {
    "fp64": True, "micro_batch_size": 1, "global_batch_size": 8, "train_iters": STEPS, "eval_iters": 1,
    "eod_mask_loss": True, "tokenizer_type": "NullTokenizer", "vocab_size": 100, "clip_grad": 0.5,
}  # fmt: skip
SHARDED = {"use_distributed_optimizer": True}
LATE = {"overlap_grad_reduce": False}
GATHER_LATE = {"overlap_param_gather": False}
SMALL = {"ddp_bucket_size": 3000}
TWICE = {"num_distributed_optimizer_instances": 2}
RECOMPUTED = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": LATE,
    "plain overlapped": SMALL,
    "plain, small buckets, late": {**SMALL, **LATE},
    "sharded": {**SHARDED, **LATE},
    "sharded, small buckets, late": {**SHARDED, **SMALL, **LATE},
    "sharded, gathered late": {**SHARDED, **SMALL, **GATHER_LATE},
    "sharded overlapped": {**SHARDED, **SMALL},
    "sharded, buckets by number": {**SHARDED, "ddp_num_buckets": 4},
    "sharded, padded": {**SHARDED, **SMALL, "ddp_pad_buckets_for_high_nccl_busbw": True},
    "recomputed": {**SHARDED, **SMALL, **RECOMPUTED},
    "dropout": {**SHARDED, **SMALL, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "packed": {**SHARDED, **SMALL, "packing": True},
    "untied": {**SHARDED, **SMALL, "untie_embeddings_and_output_weights": True, "softmax_type": "learnable"},
}
MODELS = (
    "train_iters",
    "packing",
    "hidden_dropout",
    "attention_dropout",
    "untie_embeddings_and_output_weights",
    "softmax_type",
)


def sent(view: torch.Tensor) -> torch.Tensor:
    """A copy that can be pickled: PyTorch 2.11 cannot read fp8 tensors back, their bytes it can."""
    return view.view(torch.uint8 if view.itemsize == 1 else view.dtype).clone()


def finished(run: OpenRun) -> dict[str, Any]:
    """What a run finds and holds at its end."""
    steps = take_steps(run)
    run.state.optimizer.settle()
    found = {
        "losses": [step.loss for step in steps],
        "norms": [step.result.grad_norm for step in steps],
        "state": state_of(run),
        "params": {name: sent(view) for name, view in run.state.optimizer.buffers.views("param").items()},
        "params_norm": run.state.optimizer.params_norm(),
        "tokens": run.state.consumed_tokens,
    }
    dp, source = run.groups.dp, run.splits.valid
    assert source is not None
    batches = eval_batches(
        source, run.plan.evaluation.samples, 1, num_workers=0, dp=dp.size, dp_rank=dp.index
    )
    found["valid"] = evaluate(run.state.model, batches, run.device, dp)
    return found


def on_one(values: Mapping[str, Any], cache: Path) -> dict[str, Any]:
    return finished(opened(cache, {**BASE, **values}))


def variants_on(world_size: int, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Each variant on that many ranks, all of them in one start of the processes."""

    def work(environment: Environment) -> dict[str, Any]:
        found = {}
        for number, (name, values) in enumerate(variants.items()):
            here = replace(environment, attempt=number)
            run = open_run(parsed({**BASE, **values}), here, lambda _: None)
            found[name] = finished(run)
            run.close()
        return found

    ranks = on_ranks(world_size, work)
    return {name: [rank[name] for rank in ranks] for name in variants}


def model_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in MODELS}


def compare(ranks: list[dict[str, Any]], alone: dict[str, Any], *, rel: float = 1e-10) -> None:
    """Ranks agree with each other bit for bit, and with one process to rounding."""
    first = ranks[0]
    for rank in ranks[1:]:
        for what in ("losses", "norms", "valid", "params_norm", "tokens"):
            assert rank[what] == first[what], what
        assert all(torch.equal(rank["params"][name], first["params"][name]) for name in first["params"])
    assert first["losses"] == pytest.approx(alone["losses"], rel=rel)
    assert first["norms"] == pytest.approx(alone["norms"], rel=rel)
    assert first["params_norm"] == pytest.approx(alone["params_norm"], rel=rel)
    assert first["valid"].loss == pytest.approx(alone["valid"].loss, rel=rel)
    assert (first["tokens"], first["valid"].num_tokens) == (alone["tokens"], alone["valid"].num_tokens)
    state = merged([rank["state"] for rank in ranks])
    assert state.keys() == alone["state"].keys()
    for name, tensor in alone["state"].items():
        torch.testing.assert_close(state[name], tensor, rtol=rel, atol=rel, msg=lambda m, n=name: f"{n}: {m}")


def same_bits(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    assert first[0]["losses"] == second[0]["losses"] and first[0]["norms"] == second[0]["norms"]
    one, two = (merged([rank["state"] for rank in ranks]) for ranks in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)


def check_all(world_size: int, variants: Mapping[str, Mapping[str, Any]], cache: Path) -> dict[str, Any]:
    found = variants_on(world_size, variants)
    alone: dict[str, dict[str, Any]] = {}
    for name, ranks in found.items():
        key = repr(model_of(variants[name]))
        if key not in alone:
            alone[key] = on_one(model_of(variants[name]), cache)
        compare(ranks, alone[key])
    return found


def test_b061_two_ranks_equal_one(tmp_path: Path) -> None:
    """Plain and sharded, late and overlapped; with two ranks every sum has one order.

    So where buckets are cut alike, and the norm with them, all bits agree.
    """
    found = check_all(2, VARIANTS, tmp_path)
    same_bits(found["plain"], found["sharded"])
    same_bits(found["sharded overlapped"], found["recomputed"])
    alike = [
        name for name, values in VARIANTS.items() if values.keys() <= {*SHARDED, *SMALL, *LATE, *GATHER_LATE}
    ]
    for name in alike:
        if "ddp_bucket_size" in VARIANTS[name]:
            same_bits(found["plain overlapped"], found[name])


@pytest.mark.long
def test_compiled_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks fire block by block, and parts are waited for between the compiled blocks."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    check_all(2, {"compiled": {**SHARDED, **SMALL, "use_torch_compile": True, "train_iters": 4}}, tmp_path)


FOUR = {
    "plain overlapped": SMALL,
    "sharded overlapped": {**SHARDED, **SMALL},
    "sharded, late": {**SHARDED, **SMALL, **LATE},
    "two instances": {**SHARDED, **SMALL, **TWICE},
    "two instances, late": {**SHARDED, **SMALL, **LATE, **TWICE},
    "two microbatches a rank": {**SHARDED, "global_batch_size": 8},
}


def test_four_ranks_equal_one(tmp_path: Path) -> None:
    found = check_all(4, FOUR, tmp_path)
    same_bits(found["sharded overlapped"], found["sharded, late"])
    same_bits(found["two instances"], found["two instances, late"])


def test_fp8_on_ranks(tmp_path: Path) -> None:
    """B046: gathered late or just in time, held whole or in shards: the same bits, amax histories too."""
    fp8 = {"fp64": False, "bf16": True, "fp8_format": "hybrid", "train_iters": 4, **SMALL}
    variants = {"plain": fp8, "late": {**fp8, **SHARDED, **GATHER_LATE}, "sharded": {**fp8, **SHARDED}}
    found = variants_on(2, variants)
    same_bits(found["plain"], found["sharded"])
    same_bits(found["late"], found["sharded"])


def test_split_main_parameters_on_ranks(tmp_path: Path) -> None:
    """A bf16 parameter and 16 more bits of the own part: the numbers of fp32 main parameters."""
    bf16 = {"fp64": False, "bf16": True, "train_iters": 4, **SHARDED, **SMALL}
    found = variants_on(2, {"whole": bf16, "halves": {**bf16, "use_precision_aware_optimizer": True}})
    same_bits(found["whole"], found["halves"])


def test_moments_in_8_bits_on_ranks(tmp_path: Path) -> None:
    """Blocks lie within parameter and shard, and noise knows no place: held whole or in shards, same bits."""
    coded = {
        "fp64": False, "bf16": True, "train_iters": 4, "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", **SMALL,
    }  # fmt: skip
    away = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.4}
    found = variants_on(
        2, {"plain": coded, "sharded": {**coded, **SHARDED}, "away": {**coded, **SHARDED, **away}}
    )
    same_bits(found["plain"], found["sharded"])
    same_bits(found["sharded"], found["away"])


def test_states_in_host_memory_on_ranks(tmp_path: Path) -> None:
    """A part of each rank's own shards, or of states that every rank holds: the numbers do not know."""
    away = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "train_iters": 4, **SMALL}
    here = {"train_iters": 4, **SMALL}
    variants = {"here": here, "plain": away, "sharded": {**away, **SHARDED}}
    found = variants_on(2, variants)
    same_bits(found["here"], found["plain"])
    same_bits(found["plain"], found["sharded"])


def test_a_rank_holds_what_the_plan_says() -> None:
    """Bytes of parameters, gradients and optimizer states on each of two ranks: within 3 % (alignment)."""
    values = {
        **BASE, **SHARDED, "fp64": False, "bf16": True, "hidden_size": 256, "ffn_hidden_size": 512,
        "ddp_bucket_size": 400_000,
    }  # fmt: skip

    def work(environment: Environment) -> tuple[int, int]:
        run = open_run(parsed(values), environment, lambda _: None)
        buffers, seen = run.state.optimizer.buffers, dict[int, int]()
        for buffer in (*buffers.buffers, *buffers.shards):
            for kind, tensor in buffer.tensors.items():
                whole = buffer.window is None or kind not in ("param", "main_grad")
                if whole:
                    seen[tensor.data_ptr()] = tensor.nbytes
        run.close()
        return sum(seen.values()), sum(run.plan.memory.fullest.state.values())

    for held, predicted in on_ranks(2, work):
        assert held == pytest.approx(predicted, rel=0.03)


def test_beside_tensor_parallel(tmp_path: Path) -> None:
    """Two tp ranks with sequence parallelism, two dp ranks each that share the states."""
    tp = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "global_batch_size": 4}
    variants = {"plain": {**tp, **SMALL}, "sharded": {**tp, **SHARDED, **SMALL}}
    found = variants_on(4, variants)
    alone = on_one({"global_batch_size": 4}, tmp_path)
    for ranks in found.values():
        state = merged([rank["state"] for rank in ranks])
        for rank in ranks:
            for what in ("losses", "norms", "params_norm"):
                assert rank[what] == pytest.approx(alone[what], rel=1e-10), what
        for name, tensor in alone["state"].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-10)
    same_bits(found["plain"], found["sharded"])


@pytest.mark.long
@pytest.mark.parametrize("world_size", [4, 8])
def test_every_variant_on_more_ranks(world_size: int, tmp_path: Path) -> None:
    variants = dict(VARIANTS)
    for instances in (2, 4):
        variants[f"{instances} instances"] = {
            **SHARDED, **SMALL, "num_distributed_optimizer_instances": instances
        }  # fmt: skip
    found = check_all(world_size, variants, tmp_path)
    same_bits(found["sharded overlapped"], found["sharded, small buckets, late"])
    same_bits(found["plain overlapped"], found["plain, small buckets, late"])


def test_half_precision_on_ranks(tmp_path: Path) -> None:
    """bf16 parameters with fp32 main ones, gradients sent in fp32 or bf16, summed in either."""
    bf16 = {"fp64": False, "bf16": True, "train_iters": 4}
    half = {**bf16, **SHARDED, **SMALL, "grad_reduce_in_bf16": True}
    wide = {**half, "ddp_reduce_scatter_with_fp32_accumulation": True}
    found = variants_on(
        2, {"plain": {**bf16, **SMALL}, "sharded": {**bf16, **SHARDED, **SMALL}, "half": half, "wide": wide}
    )
    same_bits(found["plain"], found["sharded"])
    for ranks in found.values():
        params = ranks[0]["params"]
        assert all(torch.equal(params[name], ranks[1]["params"][name]) for name in params)
    alone = on_one({**bf16, "grad_reduce_in_bf16": True}, tmp_path)
    # One gradient in bf16 is off by 2^-9 of itself.
    assert found["half"][0]["losses"] == pytest.approx(alone["losses"], rel=4e-3)
    assert found["wide"][0]["losses"] == pytest.approx(alone["losses"], rel=4e-3)
