"""The ledger against other measurements of the same steps, on one GPU. Called by gpu_ledger.sh.

For the 8-layer 8B shape: what the account leaves unknown; its GEMM time against CUDA events around every
product of other steps; what profiling costs the other steps; and faults put in on purpose, each against the
time it adds to the unprofiled steps. Prints one line a finding and writes one JSON document.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def fault(
    name: str, cause: str, base: tuple[list[float], StepAccount], slow: tuple[list[float], Any]
) -> dict:
    """What the ledger says the fault costs, against the time that it adds to the unprofiled steps."""
    added = 1e3 * (statistics.median(slow[0]) - statistics.median(base[0]))
    said = slow[1].loss_ms(cause) - base[1].loss_ms(cause)
    grown = max(slow[1].losses, key=lambda loss: loss.ms - base[1].loss_ms(loss.key)).key
    found = {"fault": name, "cause": cause, "added_ms": added, "ledger_ms": said, "ratio": said / added,
             "grew_most": grown, "holds": grown == cause and abs(said / added - 1) <= 0.1}  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def reopened(words: str, shape: str) -> tuple[list[float], StepAccount | None]:
    gc.collect()
    torch.cuda.empty_cache()
    return steps_of(opened(words, shape))


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
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
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
    with slow_loader():
        slow = steps_of(run)
    faults = [fault("a sleep in the data loader", "data", base, slow)]
    with synchronising(run):
        faults.append(fault("a synchronisation each layer", "synchronisation", base, steps_of(run)))
    del run, slow
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    changed: list[tuple[str, str, Callable[[], Any]]] = [
        ("full recompute", "recompute", lambda: reopened(full, shape)),
        ("an activation that is not fused", "activation", lambda: reopened("--no-bias-swiglu-fusion", shape)),
    ]
    faults += [fault(name, cause, base, make()) for name, cause, make in changed]
    return found | {"faults": faults}


if __name__ == "__main__":
    path, shape = Path(sys.argv[1]), " ".join(sys.argv[2:]) or SHAPE
    path.write_text(json.dumps(measure(shape), indent=2) + "\n")
