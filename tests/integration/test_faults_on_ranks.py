"""Known faults of distributed optimizers, overlap and determinism, each looked for on two ranks."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.checkpoint import save_checkpoint
from redline.comm import Collectives
from redline.comm.transport import _WideSum
from redline.config import Environment
from redline.optim import Optimizer
from redline.optim.flat import FlatBuffers
from redline.optim.reduce import GradReducer
from redline.optim.shared import SharedParameters
from redline.run import OpenRun, open_run
from redline.run.resume import checkpoint_values
from redline.step import train_step

from .ranks import merged, on_ranks, state_of
from .tiny import parsed, take_steps

BASE = {"fp64": True, "micro_batch_size": 1, "ddp_bucket_size": 3000, "eval_iters": 0, "train_iters": 20}
SHARDED = {**BASE, "use_distributed_optimizer": True}
LATE = {"overlap_grad_reduce": False, "overlap_param_gather": False}
TP = {**BASE, "tensor_model_parallel_size": 2, "sequence_parallel": True}
WORD = "embedding.word.weight"


def opened(values: dict[str, Any], environment: Environment, attempt: int = 0) -> OpenRun:
    return open_run(parsed(values), replace(environment, attempt=attempt), lambda _: None)


def save(run: OpenRun, folder: Path) -> None:
    values = checkpoint_values(run.config, run.plan, run.schedules, run.state, {})
    group = run.groups.control.handle
    save_checkpoint(folder, run.state.iteration, run.state.tensors(), values, group=group)


def test_b114_nan_in_a_copy_that_another_rank_measures_skips_the_step() -> None:
    """Both tensor-parallel ranks hold a norm's whole gradient, and the first answers for it in sums."""
    values = {**BASE, "tensor_model_parallel_size": 2, "nonfinite_action": "skip", "train_iters": 2}
    name, sum_partial = "layers.0.attention.norm.weight", SharedParameters.sum_partial

    def work(environment: Environment) -> tuple[list[tuple[bool, str | None]], bool]:
        run = opened(values, environment)

        def spoiled(shared: SharedParameters, buffers: FlatBuffers) -> None:
            sum_partial(shared, buffers)
            if environment.rank == 1 and run.state.iteration == 0:
                buffers.views("main_grad")[name].fill_(math.nan)

        SharedParameters.sum_partial = spoiled  # type: ignore[method-assign]
        steps = take_steps(run)
        sound = bool(run.state.optimizer.buffers.views("param")[name].isfinite().all())
        run.close()
        return [(step.result.applied, step.result.bad_parameter) for step in steps], sound

    for steps, sound in on_ranks(2, work):
        assert steps == [(False, name), (True, None)] and sound


def test_what_a_wide_sum_receives_is_foreseen_and_freed() -> None:
    """It lies beside the gradients until it is added to them, and not from step to step."""
    bf16 = {"fp64": False, "bf16": True, "grad_reduce_in_bf16": True, "train_iters": 3}
    values = {**SHARDED, **bf16, "ddp_reduce_scatter_with_fp32_accumulation": True}

    def received() -> int:
        return sum(each._parts.nbytes for each in gc.get_objects() if type(each) is _WideSum)

    def work(environment: Environment) -> tuple[int, int, int, int]:
        run, most, wait = opened(values, environment), [], _WideSum.wait

        def watched(self: _WideSum) -> None:
            most.append(received())
            wait(self)

        _WideSum.wait = watched  # type: ignore[method-assign]
        take_steps(run)
        memory, left = run.plan.memory.fullest, received()
        held = sum(memory.state.values()) + memory.workspace["library"]
        grads = sum(flat.nbytes for flat in run.state.optimizer.buffers.flat("main_grad"))
        run.close()
        return max(most), left, memory.moments["reduction"] - held, grads

    for most, left, foreseen, grads in on_ranks(2, work):
        assert most == grads and left == 0
        assert foreseen == pytest.approx(grads, rel=0.03)


@pytest.mark.parametrize("values", [SHARDED, TP], ids=["sharded", "tp"])
def test_b052_head_and_embedding_stay_one(values: dict[str, Any], tmp_path: Path) -> None:
    """B052: one matrix, the same on every rank that holds it, after 20 steps, a save and a load."""

    def work(environment: Environment) -> list[Tensor]:
        found = []
        for attempt, more in enumerate(({}, {"load": str(tmp_path), "train_iters": 22})):
            run = opened({**values, **more}, environment, attempt)
            take_steps(run)
            run.state.optimizer.settle()
            names = dict(run.state.model.named_parameters())
            assert WORD in names and "head.weight" not in names
            main = run.state.optimizer.buffers.views("param")[WORD]
            assert names[WORD].data_ptr() == main.data_ptr()
            found.append(main.clone())
            if attempt == 0:
                save(run, tmp_path)
            run.close()
        return found

    first, second = on_ranks(2, work)
    if values is SHARDED:
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1]), "two more steps change it"


def test_b055_gathering_leaves_gradients_alone() -> None:
    """B055: three steps: zero when backward starts, and the same bits at its end with and without."""

    def work(environment: Environment) -> list[list[Tensor]]:
        found = []
        for attempt, more in enumerate(({}, {"overlap_param_gather": False})):
            run = opened({**SHARDED, **more}, environment, attempt)
            grads: list[Tensor] = []
            with watched(run, grads):
                take_steps(run, 3)
            found.append(grads)
            run.close()
        return found

    for overlapped, late in on_ranks(2, work):
        assert len(overlapped) == len(late) > 3
        assert all(torch.equal(one, two) for one, two in zip(overlapped, late, strict=True))


@contextmanager
def watched(run: OpenRun, grads: list[Tensor]) -> Iterator[None]:
    """Keeps the own gradients of each step as the optimizer finds them; before, there are none."""
    step, loss, begun = Optimizer.step, train_step.microbatch_loss, [True]

    def noted(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        grads.extend(each.clone() for each in optimizer.ranks.own_grads(SharedParameters()))
        begun[0] = True
        return step(optimizer, *args, **options)

    def checked(*args: Any) -> Tensor:
        if begun[0]:
            for buffer in run.state.optimizer.buffers.buffers:
                assert not buffer.tensors["main_grad"].any()
        begun[0] = False
        return loss(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", noted)
        patch.setattr(train_step, "microbatch_loss", checked)
        yield


@pytest.mark.parametrize("skipped", [False, True], ids=["step 0", "step 1, skipped"])
def test_b059_saving_before_the_first_applied_step(skipped: bool, tmp_path: Path) -> None:
    """B059: no step was applied yet; what is loaded goes on as the run itself does."""

    def work(environment: Environment) -> list[tuple[list[float], dict[str, Tensor]]]:
        found = []
        for attempt, more in enumerate(({}, {"load": str(tmp_path)})):
            run = opened({**SHARDED, "nonfinite_action": "skip", **more}, environment, attempt)
            if attempt == 0:
                if skipped:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(train_step, "microbatch_loss", nan_loss)
                        (step,) = take_steps(run, 1)
                        assert not step.result.applied
                save(run, tmp_path)
            assert run.state.iteration == int(skipped)
            losses = [step.loss for step in take_steps(run, 3)]
            run.state.optimizer.settle()
            found.append((losses, state_of(run)))
            run.close()
        return found

    ranks = on_ranks(2, work)
    (losses, _), (again, _) = ranks[0]
    assert losses == again and all(map(math.isfinite, losses))
    whole, resumed = (merged([rank[number][1] for rank in ranks]) for number in range(2))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


MICROBATCH_LOSS = train_step.microbatch_loss


def nan_loss(*args: Any) -> Tensor:
    return MICROBATCH_LOSS(*args) * math.nan


@pytest.mark.parametrize("steps", [6, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("values", [BASE, SHARDED], ids=["plain", "sharded"])
def test_b061_any_timing_gives_the_same_bits(values: dict[str, Any], steps: int) -> None:
    """B061: hooks, sends and waits held up at random, memory taken and freed between: as without overlap."""

    def work(environment: Environment) -> list[tuple[list[float], dict[str, Tensor]]]:
        found = []
        for attempt, more in enumerate((LATE if values is SHARDED else {"overlap_grad_reduce": False}, {})):
            run = opened({**values, **more, "train_iters": steps}, environment, attempt)
            with held_up(environment.rank) if attempt else pytest.MonkeyPatch.context():
                losses = [step.loss for step in take_steps(run)]
            run.state.optimizer.settle()
            found.append((losses, state_of(run)))
            run.close()
        return found

    ranks = on_ranks(2, work)
    (late, _), (overlapped, _) = ranks[0]
    assert late == overlapped and len(late) == steps
    one, two = (merged([rank[number][1] for rank in ranks]) for number in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@contextmanager
def held_up(rank: int) -> Iterator[None]:
    """Random sleeps in gradient hooks and around collectives; blocks of memory full of NaN come and go."""
    chance, blocks = random.Random(rank), list[Tensor]()

    def pause() -> None:
        time.sleep(chance.choice((0, 0, 0, 0.0005, 0.002)))
        blocks.append(torch.full((chance.randrange(1, 4000),), math.nan, dtype=torch.float64))
        if len(blocks) > 5:
            blocks.pop(chance.randrange(len(blocks)))

    def paused(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            pause()
            result = function(*args, **options)
            pause()
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradReducer, "_send", paused(GradReducer._send))
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            patch.setattr(Collectives, name, paused(getattr(Collectives, name)))
        patch.setattr(train_step, "microbatch_loss", paused(train_step.microbatch_loss))
        yield


@pytest.mark.parametrize("values", [SHARDED, TP], ids=["sharded", "tp"])
def test_b118_deterministic_ranks_twice(values: dict[str, Any]) -> None:
    """B118: 20 steps in bf16 with dropout, twice: losses and all state bit for bit."""
    half = {**values, "fp64": False, "bf16": True, "hidden_dropout": 0.1, "deterministic_mode": True}

    def work(environment: Environment) -> list[tuple[list[float], dict[str, Tensor]]]:
        found = []
        for attempt in range(2):
            run = opened(half, environment, attempt)
            losses = [step.loss for step in take_steps(run)]
            run.state.optimizer.settle()
            found.append((losses, state_of(run)))
            run.close()
        return found

    for (losses, state), (again, same) in on_ranks(2, work):
        assert losses == again and len(losses) == 20
        assert state.keys() == same.keys()
        assert all(torch.equal(state[name].nan_to_num(), same[name].nan_to_num()) for name in state)
