"""Ways of looking at a run, each blind to what two runs of the same options may differ in (time, place)."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

import redline.checkpoint.save
from redline.cli.train import main as train_main
from redline.config import Environment
from redline.data import Microbatch, Source
from redline.errors import RedlineError
from redline.hardware import detect_cpu
from redline.plan import make_plan
from redline.run import open_run, train_opened
from redline.run.data import data_prefixes
from redline.run.memory import memory_history
from redline.run.profiling import nsight_capture
from redline.run.vocabulary import open_vocabulary

from .ranks import on_ranks, state_of
from .tiny import TINY_VALUES, Values, opened, parsed, take_steps, valid_batches, valid_loss, words_of

# Of metrics.jsonl: the clock, and what hangs on it or on the machine.
VARYING = (
    "tokens_per_s",
    "step_time_s",
    "data_wait_s",
    "mfu",
    "flops_per_s",
    "memory",
    "memory_now",
    "time_s",
    "own_time_s",
)


def plan(values: Values, cache: Path) -> str:
    """Everything decided before the model is built."""
    config = parsed(values).config
    return repr(make_plan(config, detect_cpu(), config.model.vocab_size or 257))


def vocabulary(values: Values, cache: Path) -> str:
    """The size of the vocabulary, and the token that ends a document."""
    config = parsed(values).config
    return repr(open_vocabulary(config, data_prefixes(config, None)))


def choices(values: Values, cache: Path) -> str:
    """What was decided while opening, said to the user, and loaded."""
    said: list[str] = []
    run = opened(cache, values, said.append)
    return repr((run.choices, said, run.start and run.start.folder, run.state.values()))


def data(values: Values, cache: Path) -> str:
    """The batches of all steps, and of an evaluation."""
    run = opened(cache, values)
    train = [batch for step in run.batches() for batch in step]
    return digest([*train, *valid_batches(run)])


def numbers(values: Values, cache: Path) -> str:
    """What every step found and used, parameters and moments at the end, the validation loss."""
    run = opened(cache, values)
    steps = [(each.loss, each.lr, each.result) for each in take_steps(run)]
    return repr((steps, digest(run.state.tensors()), valid_loss(run)))


def outcome(values: Values, cache: Path) -> str:
    """What a whole run prints, and leaves in the folder it was started in (in `run`, if not said)."""
    printed = _train({"save": "run", **values}, cache)
    found: list[Any] = [_without_numbers(printed)]
    for path in sorted(path for path in Path().rglob("*") if path.is_file()):
        name = re.sub(r"tfevents.*|(?<=run-)\d{8}-\d{6}", "", str(path))
        found.append((name, _content(path)))
    return json.dumps(found, indent=1)


def process(values: Values, cache: Path) -> str:
    """What the process does during a run: threads, files it maps, signals, garbage, determinism."""
    facts: dict[str, set[Any]] = {}
    collections: list[int] = []

    def note(name: str, value: Any) -> None:
        facts.setdefault(name, set()).add(value)

    def batch(source: Source, *place: int) -> Microbatch:
        note("loader", re.sub(r"_\d+", "", threading.current_thread().name))
        note("threads", torch.get_num_threads())
        note("automatic garbage collection", gc.isenabled())
        note("ends at SIGTERM", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        note("deterministic", torch.are_deterministic_algorithms_enabled())
        return read(source, *place)

    def memmap(path: Path, *args: Any, **options: Any) -> Any:
        note("mapped", Path(path).suffix)
        return map_file(path, *args, **options)

    def save(*args: Any) -> None:
        note("writer of checkpoints", re.sub(r"_\d+", "", threading.current_thread().name))
        write(*args)

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            collections.append(1)

    read, map_file, write = Source.batch, np.memmap, redline.checkpoint.save._save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "batch", batch)
        patch.setattr(np, "memmap", memmap)
        patch.setattr(redline.checkpoint.save, "_save", save)
        gc.callbacks.append(collected)
        try:
            _train({"save": "run", **values}, cache)
        finally:
            gc.callbacks.remove(collected)
    if False in facts["automatic garbage collection"]:  # else the number hangs on chance
        note("collections", len(collections))
    return repr(sorted((name, sorted(found)) for name, found in facts.items()))


def ranks(values: Values, cache: Path) -> str:
    """What two ranks decide, find in every step, and hold at the end."""

    def work(environment: Environment) -> str:
        run = open_run(parsed(values), replace(environment, cache_dir=cache), lambda _: None)
        steps = [(each.loss, each.lr, each.result) for each in take_steps(run)]
        return repr((run.choices, steps, digest(state_of(run))))

    return repr(on_ranks(2, work))


def compared(values: Values, cache: Path) -> str:
    """How many ranks are named where a run of two compares them."""

    def work(environment: Environment) -> str:
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("redline.run.display.say", said.append)
            here = replace(environment, cache_dir=cache)
            train_opened(open_run(parsed({"save": "run", **values}), here, lambda _: None), 0.0)
        return repr([line.count("rank ") for line in said if "slowest" in line])

    return on_ranks(2, work)[0]


def layout(values: Values, cache: Path) -> str:
    """Where the buckets of two ranks lie."""

    def work(environment: Environment) -> str:
        run = open_run(parsed(values), replace(environment, cache_dir=cache), lambda _: None)
        return repr([buffer.buckets for buffer in run.state.optimizer.buffers.buffers])

    return repr(on_ranks(2, work))


def launched(values: Values, cache: Path) -> str:
    """What `redline train` hands to torch elastic; nothing where it trains itself."""
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.comm.elastic.launch", lambda words, **options: calls.append(options))
        patch.setattr("redline.run.run", lambda *_: None)
        train_main(words_of({**TINY_VALUES, **values}))
    return repr(calls)


def sinks(values: Values, cache: Path) -> str:
    """What a run asks of Weights & Biases, of Prometheus' server, and of whoever watches its throughput."""
    calls: list[Any] = []

    class Recorder:
        def __init__(self, *args: Any, **options: Any) -> None:
            calls.append((args, options))

        def add(self, *args: Any) -> None: ...

        def close(self) -> None: ...

        def look(self, *args: Any) -> None: ...

    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: calls.append({**options, "config": None}) or _WandbRun()  # type: ignore
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", wandb)
        patch.setattr("redline.run.sinks.PrometheusServer", Recorder)
        patch.setattr("redline.run.actions.ThroughputWatch", Recorder)
        _train({"save": "run", **values}, cache)
    return repr(calls)


class _WandbRun:
    def log(self, values: Any, step: int) -> None: ...

    def finish(self) -> None: ...


def gpu_tools(values: Values, cache: Path) -> str:
    """What is asked of the GPU's own tools around steps; there is none, so they are recorded."""
    calls: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *args, **options: calls.append((name, args, options)) or nullcontext()

    options, device = parsed(values).config.logging, torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", noted("synchronize"))
        patch.setattr(
            torch.cuda,
            "cudart",
            lambda: types.SimpleNamespace(cudaProfilerStart=noted("start"), cudaProfilerStop=noted("stop")),
        )
        patch.setattr(torch.autograd.profiler, "emit_nvtx", noted("nvtx"))
        patch.setattr(torch.cuda.memory, "_record_memory_history", noted("record"))
        patch.setattr(torch.cuda.memory, "_dump_snapshot", noted("snapshot"))
        with memory_history(options, device, 0):
            if (capture := nsight_capture(options, device)) is not None:
                capture.start()
                capture.stop((1,))
    return repr(calls)


def refused_or(observe: Any, values: Values, cache: Path) -> str:
    """What `observe` sees, or the error; what the process had set before is set again."""
    threads = torch.get_num_threads()
    try:
        return str(observe(values, cache))
    except RedlineError as error:
        return str(error)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def digest(content: Any) -> str:
    """A hash of batches or named tensors: names, shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for name, tensor in _tensors(content):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(content: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(content, dict):
        yield from content.items()
        return
    for batch in content:
        for name in Microbatch.__dataclass_fields__:
            if isinstance(tensor := getattr(batch, name), torch.Tensor):
                yield name, tensor
        if batch.documents is not None:
            yield "cu_seqlens", batch.documents.cu_seqlens


def _train(values: Values, cache: Path) -> str:
    """A whole run; returns what it printed."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        train_opened(opened(cache, values, print), 0.0)
    return printed.getvalue()


def _without_numbers(text: str) -> str:
    """The words of each line, and the step it is about."""
    lines = []
    for line in text.splitlines():
        step = re.search(r"iteration +(\d+)", line)
        lines.append(f"{step and step[1]}: {re.sub(r'[^A-Za-z/ ]+', '#', line)}")
    return "\n".join(lines)


def _content(path: Path) -> Any:
    """What can be compared of a file."""
    if path.suffix == ".jsonl":
        records = map(json.loads, path.read_text().splitlines())
        return [{key: record[key] for key in record if key not in VARYING} for record in records]
    if "tfevents" in path.name:
        events = LegacyEventFileLoader(str(path)).Load()
        return [(event.step, [value.tag for value in event.summary.value]) for event in events]
    if path.name == "summary.json":
        return json.loads(path.read_text())["outcome"]
    if path.suffix == ".txt":
        return path.read_text()
    return path.stat().st_size if path.suffix == ".safetensors" else None


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in `folder`."""
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield
