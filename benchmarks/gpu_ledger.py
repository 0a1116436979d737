"""The ledger against other measurements of the same steps, on one GPU. Called by gpu_ledger.sh.

For the 8-layer 8B shape: what the account leaves unknown; its GEMM time against CUDA events around every
product of other steps; what profiling costs the other steps; and faults put in on purpose. What the account
says of a fault is held against three sizes of it: what it adds to the wall time of the profiled steps, which
the account is of (the verdict); to that of the other steps, where a launch costs less; and, where that can be
known, its own time alone, since a card that is short of power runs other kernels faster or slower beside it.
Prints one line a finding and writes one JSON document.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redline.bench.record import provenance
from redline.config import Environment, parse_args
from redline.data import Source
from redline.ledger import StepAccount, open_ledger, read_metrics
from redline.run import OpenRun, open_run
from redline.run.actions import RunActions
from redline.run.display import Display
from redline.run.folder import RunFolder
from redline.run.profiling import Profiling
from redline.step import Action, StopConditions, train

SHAPE = (
    "--preset llama3-8b --num-layers 8 --seq-length 8192 --mock-data --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 1000 --eval-iters 0 --bf16 --num-workers 0 --device cuda"
)
STEPS = 12  # 3 to warm up, 1 for the tracer, 2 profiled, 6 others
SLEEP_S = 0.15  # of each microbatch in the slow loader
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "addmm_")


def opened(words: str = "", shape: str = SHAPE) -> OpenRun:
    parsed = parse_args([*shape.split(), *words.split()])
    return open_run(
        parsed, Environment(cache_dir=Path(tempfile.gettempdir()) / "redline-cache"), lambda _: None
    )


def steps_of(
    run: OpenRun, steps: int = STEPS, *, profiles: bool = True
) -> tuple[list[float], StepAccount | None]:
    """(seconds of each unprofiled step after the warm-up, the account) of the run's next steps."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as held:
        folder = RunFolder(Path(name))
        ledger = held.enter_context(open_ledger(folder.root))
        display = held.enter_context(Display(steps, 0, log_interval=1000, shown=False))
        batches = held.enter_context(closing(run.batches()))
        step = run.make_step()
        profiling = Profiling(run, folder, step, ledger)
        actions = RunActions(run, folder, ledger, display, None, profiling)
        profiler = profiling.wanted if profiles else None
        total = run.state.iteration + steps
        train(
            run.state, step, batches, [Action("record", 1, actions.record)], StopConditions(), total, profiler
        )
        profiling.finish()
        records = read_metrics(folder.metrics)[3:]
        return [record["step_time_s"] for record in records if not record["profiled"]], profiling.account


class ProductTimes(TorchDispatchMode):
    """CUDA events around every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        result = func(*args, **(kwargs or {}))
        after.record()
        self.pairs.append((before, after))
        return result

    def take_ms(self) -> float:
        torch.cuda.synchronize()
        found = sum(before.elapsed_time(after) for before, after in self.pairs)
        self.pairs.clear()
        return found


def products_ms(run: OpenRun, steps: int = 3) -> list[float]:
    """Milliseconds of all products of each of the next steps, by events."""
    step, found = run.make_step(), []
    with closing(run.batches()) as batches:
        step(next(batches))
        for _ in range(steps):
            with ProductTimes() as times:
                step(next(batches))
            found.append(times.take_ms())
    return found


@contextmanager
def slow_loader() -> Iterator[None]:
    read = Source.batch

    def slow(self: Any, *place: int) -> Any:
        time.sleep(SLEEP_S)
        return read(self, *place)

    with mock.patch.object(Source, "batch", slow):
        yield


@contextmanager
def synchronising(run: OpenRun) -> Iterator[None]:
    hooks = [
        layer.register_forward_hook(lambda *_: torch.cuda.synchronize()) for layer in run.state.model.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def activations_ms(run: OpenRun, repeats: int = 20) -> float:
    """Milliseconds of a step's activations by themselves, forward and backward, by CUDA events."""
    mlp, length = run.state.model.layers[0].mlp, run.config.train.seq_length
    sizes = length, run.config.train.micro_batch_size
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    y_SBF = torch.randn(*sizes, mlp.shape.fc1_size, requires_grad=True, **kind)
    grad_SBF = torch.randn(*sizes, mlp.shape.ffn, **kind)
    times = []
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        torch.autograd.grad(mlp.activation(y_SBF), y_SBF, grad_SBF)
        after.record()
        times.append((before, after))
    torch.cuda.synchronize()
    once = statistics.median(before.elapsed_time(after) for before, after in times[repeats // 2 :])
    return once * len(run.state.model.layers) * run.plan.batch.num_microbatches(run.state.consumed_samples)


def fault(
    name: str,
    cause: str,
    base: tuple[list[float], StepAccount],
    slow: tuple[list[float], Any],
    alone_ms: float | None = None,
) -> dict[str, Any]:
    """What the ledger says the fault costs, against what it adds to profiled steps, to others, and alone."""
    said = slow[1].loss_ms(cause) - base[1].loss_ms(cause)
    added = {
        "profiled_steps": slow[1].wall_ms - base[1].wall_ms,
        "other_steps": 1e3 * (statistics.median(slow[0]) - statistics.median(base[0])),
        "alone": alone_ms,
    }
    ratios = {size: said / ms for size, ms in added.items() if ms}
    changes = {loss.key: loss.ms - base[1].loss_ms(loss.key) for loss in slow[1].losses}
    grown = max(changes, key=lambda key: changes[key])
    found = {"fault": name, "cause": cause, "ledger_ms": said, "added_ms": added, "ratio": ratios,
             "grew_most": grown, "changes_ms": {key: ms for key, ms in changes.items() if abs(ms) >= 0.1},
             "holds": grown == cause and abs(ratios["profiled_steps"] - 1) <= 0.1}  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def reopened(words: str, shape: str) -> OpenRun:
    gc.collect()
    torch.cuda.empty_cache()
    return opened(words, shape)


def measure(shape: str) -> dict[str, Any]:
    run = opened(shape=shape)
    base = steps_of(run)
    account = base[1]
    assert account is not None
    total = account.ideal_ms + sum(loss.ms for loss in account.losses)
    off, _ = steps_of(run, profiles=False)
    by_events = products_ms(run)
    by_ledger = sum(row.ms for row in account.operators if row.kind == "gemm")
    found: dict[str, Any] = {
        "case": "ledger",
        **provenance("cuda", os.environ.get("COMMIT")),
        "shape": shape,
        "account": account.as_dict() | {"operators": account.as_dict()["operators"][:40]},
        "sums_off_by": abs(total / account.wall_ms - 1),
        "unknown_share": account.loss_ms("unknown") / account.wall_ms,
        "profiled_step_overhead": account.overhead,
        "step_s": statistics.median(base[0]),
        "step_s_ledger_off": statistics.median(off),
        "gemm_ms_ledger": by_ledger,
        "gemm_ms_events": by_events,
        "gemm_off_by": by_ledger / statistics.median(by_events) - 1,
    }
    print(json.dumps({key: found[key] for key in found if key not in ("account", "shape")}), flush=True)
    for loss in account.losses:
        print(f"  {loss.key:16} {loss.ms:9.3f} ms {loss.share:7.2%}", flush=True)
    num_microbatches = run.plan.batch.num_microbatches(run.state.consumed_samples)
    with slow_loader():
        slow = steps_of(run)
    faults = [fault("a sleep in the data loader", "data", base, slow, 1e3 * SLEEP_S * num_microbatches)]
    with synchronising(run):
        faults.append(fault("a synchronisation each layer", "synchronisation", base, steps_of(run)))
    fused_ms = activations_ms(run)
    del run
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    faults.append(fault("full recompute", "recompute", base, steps_of(reopened(full, shape))))
    run = reopened("--no-bias-swiglu-fusion", shape)
    slow, alone_ms = steps_of(run), activations_ms(run) - fused_ms
    faults.append(fault("an activation that is not fused", "activation", base, slow, alone_ms))
    return found | {"faults": faults}


if __name__ == "__main__":
    path, shape = Path(sys.argv[1]), " ".join(sys.argv[2:]) or SHAPE
    path.write_text(json.dumps(measure(shape), indent=2) + "\n")
