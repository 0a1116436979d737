"""Every fused operator against its plain twin, eager and compiled, and the libraries people take instead.

A case is first checked (gate.py); an operator that fails is not timed. Times are medians over rounds in which
the providers and two copies take turns (turns.py), the L2 cache cleared and the host ahead of the device, so
that they are the device's alone; what a call allocates is counted apart (`workspace_bytes`), and so is what
an eager call costs the host (host_times.py).
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from redline.bench.gate import Gate, check, differentiable, draw, outputs_of, upstream_of
from redline.bench.host_times import add_host_times
from redline.bench.record import Keep
from redline.bench.rooms import rooms, rooms_named
from redline.bench.turns import CudaClock, Turns, take_turns
from redline.kernels.bench_case import BenchCase, Provider
from redline.units import GIB


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each case is measured."""

    rounds: int
    warmup: int
    compile: bool
    cases_a_room: int | None

    def rounds_of(self, case: BenchCase) -> int:
        """Fewer where arithmetic is the limit: a call then takes tens of milliseconds."""
        return self.rounds // 3 if case.flops else self.rounds


FULL = Effort(rounds=60, warmup=5, compile=True, cases_a_room=None)
QUICK = Effort(rounds=60, warmup=3, compile=True, cases_a_room=1)
LIBRARIES = ("liger-kernel", "quack-kernels")  # whose operators stand beside ours


def cases_of(only: Sequence[str] = (), effort: Effort = FULL) -> list[BenchCase]:
    """The cases of all rooms, or of those named (see `rooms_named`).

    Raises: UsageError for a room that does not exist.
    """
    found: list[BenchCase] = []
    for name in rooms_named(only) if only else rooms():
        cases = importlib.import_module(f"redline.kernels.{name}.bench").CASES
        limit = len(cases) if effort.cases_a_room is None else effort.cases_a_room
        found += [case for index, case in enumerate(cases) if index < limit or case.quick]
    return found


def libraries() -> dict[str, str | None]:
    """The version of each library to compare with; None where it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def bench_kernels(
    only: Sequence[str], effort: Effort, say: Callable[[str], object], keep: Keep = lambda rows: None
) -> list[dict[str, Any]]:
    """Check and time the cases on the current GPU; one row a case, the measured copy bandwidth in each.

    A case that fails has a row with its error in place of figures. Each row says which libraries were there.

    Args:
        keep: gets all rows so far after each case, so that a run that is cut short leaves what it measured.
    """
    compared = libraries()
    say(", ".join(f"{name} {version or 'not installed'}" for name, version in compared.items()))
    device = torch.device("cuda", torch.cuda.current_device())
    copies = Copies(device)
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    cases = cases_of(only, effort)
    for case in cases:
        say(f"{time.perf_counter() - started:4.0f} s  {case.op} {case.name}")
        torch._dynamo.reset()
        try:
            rows.append(bench_case(case, device, effort, copies))
        except Exception as error:  # one broken operator must not cost the measurements of the others
            say(f"{case.op} {case.name} failed: {error}")
            rows.append({"op": case.op, "case": case.name, "error": f"{type(error).__name__}: {error}"})
        rows[-1]["libraries"] = compared
        keep(rows)
        torch.cuda.empty_cache()
    say(f"{time.perf_counter() - started:4.0f} s  the host's times again")
    for case, row in zip(cases, rows, strict=True):
        measured = {name: found for name, found in row.get("providers", {}).items() if "error" not in found}
        providers = {name: call for name, call in _load(case, effort)[0].items() if name in measured}
        add_host_times(case, providers, device, measured)
        torch.cuda.empty_cache()
    keep(rows)
    return rows


class Copies:
    """Device-to-device copies that take turns with an operator: one of 1 GiB, one as small as its forward.

    A launch takes some microseconds to fill and to drain the card, a seventh of a copy of 64 MiB; and the
    bandwidth of a card drifts by half a percent in a minute.
    """

    def __init__(self, device: torch.device) -> None:
        self._source, self._target = (torch.empty(GIB, dtype=torch.int8, device=device) for _ in range(2))

    def calls(self, num_bytes: int) -> dict[str, Callable[[], object]]:
        """Both copies, where the operator reads and writes so many bytes."""
        alike = min(GIB, num_bytes // 2)
        source, target = self._source[:alike], self._target[:alike]
        return {
            "copy": lambda: self._target.copy_(self._source),
            "copy alike": lambda: target.copy_(source),
        }

    @staticmethod
    def rates(turns: Mapping[str, Turns], num_bytes: int) -> dict[str, float]:
        """Bytes that each read and wrote a second."""
        alike = 2 * min(GIB, num_bytes // 2)
        return {
            "copy_bytes_per_s": 2 * GIB / turns["copy"].seconds,
            "copy_alike_bytes_per_s": alike / turns["copy alike"].seconds,
        }


def bench_case(case: BenchCase, device: torch.device, effort: Effort, copies: Copies) -> dict[str, Any]:
    """The row of one case; `ahead` names who was faster than the fused operator by more than chance."""
    gate = check(case, device)
    row: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "bytes_forward": case.bytes_forward,
        "bytes_backward": case.bytes_backward,
        "flops": case.flops,
        "gate": gate.as_dict(),
        "providers": {},
    }
    if not gate.passed:
        return row
    providers, missing = _load(case, effort)
    calls = _calls(case, providers, device)
    rates: dict[str, dict[str, Any]] = {name: {"error": why} for name, why in missing.items()}
    for name in list(calls):
        if error := _warm_up(calls[name], effort):
            rates[name] = {"error": error}
            del calls[name]
    clock, rounds = CudaClock(device), effort.rounds_of(case)
    turns = {name: call.forward for name, call in calls.items()} | copies.calls(case.bytes_forward)
    forward = take_turns(turns, rounds, clock)
    both: dict[str, Turns] = {}
    if case.bytes_backward or case.flops:
        turns = {name: call.both for name, call in calls.items()} | copies.calls(case.bytes_forward)
        both = take_turns(turns, rounds, clock)
    row |= Copies.rates(forward, case.bytes_forward)
    for name in calls:
        rates[name] = _rates(case, name, forward, both)
        rates[name]["workspace_bytes"] = workspace_bytes(calls[name])
    row["ahead"] = {"both": _ahead(calls, both)}
    if not case.flops:  # whose forwards make gradients, or do not
        row["ahead"]["forward"] = _ahead(calls, forward)
    add_host_times(case, {name: providers[name] for name in calls}, device, rates)
    row["providers"] = {name: rates[name] for name in case.providers if name in rates}
    return row


def _load(case: BenchCase, effort: Effort) -> tuple[dict[str, Provider], dict[str, str]]:
    """The providers that can be imported, and why the others cannot."""
    found, missing = {}, {}
    for name, load in case.providers.items():
        if name == "compile" and not effort.compile:
            continue
        try:
            found[name] = load()
        except ImportError as error:
            missing[name] = f"not installed: {error}"
        except Exception as error:  # another project's package may fail in any way while it is imported
            missing[name] = _said(error)
    return found, missing


def _said(error: Exception) -> str:
    """The first line of an error, with its type."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class Call:
    """One provider on its inputs, ready to be called again and again."""

    def __init__(self, provider: Provider, inputs: tuple[Any, ...]) -> None:
        self._provider, self._inputs = provider, inputs
        self._wanted = differentiable(inputs)
        self._upstream: list[Tensor] = []

    def forward(self) -> list[Tensor]:
        """One forward; its graph is kept until the result is dropped."""
        return outputs_of(self._provider(*self._inputs))

    def both(self) -> None:
        """Forward and backward; where there is nothing to differentiate, forward."""
        outputs = [out for out in self.forward() if out.requires_grad]
        if not outputs:
            return
        if not self._upstream:
            self._upstream = upstream_of(outputs)
        torch.autograd.grad(outputs, self._wanted, self._upstream, allow_unused=True)


def _calls(case: BenchCase, providers: dict[str, Provider], device: torch.device) -> dict[str, Call]:
    """Each provider on the inputs that it is timed on."""
    shared = None if case.own_inputs else draw(case, device)
    return {
        name: Call(provider, case.inputs_of(name, draw(case, device) if shared is None else shared))
        for name, provider in providers.items()
    }


def _warm_up(call: Call, effort: Effort) -> str | None:
    """Compile and fill caches; returns what went wrong (a library that does not take this case)."""
    try:
        for _ in range(effort.warmup):
            call.forward()
            call.both()
        torch.cuda.synchronize()
    except Exception as error:  # another project's kernel may fail in any way; ours has passed its gate
        return _said(error)
    return None


def workspace_bytes(call: Call) -> int:
    """Most bytes that a forward and its backward held at once on the current GPU, beyond their inputs.

    Counted are results, gradients that are returned, what is kept for backward and every temporary tensor;
    not the inputs (a main_grad is one), the gradients sent back, nor what the allocator holds unused.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call.both()
    return torch.cuda.max_memory_allocated() - before


def _ahead(names: Iterable[str], turns: Mapping[str, Turns]) -> list[str]:
    """Which of these providers were faster than the fused operator by more than chance."""
    fused = turns.get("fused")
    return [name for name in names if fused is not None and turns[name].is_ahead_of(fused)]


def _rates(
    case: BenchCase, name: str, forward: Mapping[str, Turns], both: Mapping[str, Turns]
) -> dict[str, Any]:
    """Times and rates of one provider; how many samples were late, and of what no sample was on time."""
    found: dict[str, Any] = {"late_samples": 0, "late": []}
    passes = (
        ("forward", forward, case.bytes_forward),
        ("both", both, case.bytes_forward + case.bytes_backward),
    )
    for what, turns, num_bytes in passes:
        if name not in turns:
            continue
        rate = num_bytes / turns[name].seconds
        found |= {f"{what}_s": turns[name].seconds, f"{what}_error_s": turns[name].error_s}
        found |= {
            f"{what}_bytes_per_s": rate,
            f"{what}_share_of_copy": rate * turns["copy"].seconds / (2 * GIB),
        }
        found["late_samples"] += len(turns[name].late_s)
        found["late"] += [what] if turns[name].late else []
    if case.flops:
        found["flops_per_s"] = case.flops / (both or forward)[name].seconds
    return found


def all_passed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether every operator ran and was as accurate as its twin."""
    return all("error" not in row and Gate(**row["gate"]).passed for row in rows)
