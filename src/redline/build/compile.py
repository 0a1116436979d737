"""torch.compile of the model's blocks: one graph for all layers, or an error that says why not.

A block is compiled whole (no graph break: an operator of Redline's is one opaque node of the graph) and for
fixed sizes. What differs between layers - weights, their main_grad, dropout keys - are inputs of the graph,
so the first layer compiles and every other one finds its graph. A run needs one to train, one to evaluate.

Sharing needs no code of its own: each layer's `forward` is the same function, and PyTorch looks for a graph
by what the function reads, not by which object it belongs to. A test counts the graphs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from redline.attention import Attention, is_sdpa
from redline.build.nested_tags import marks_inside
from redline.choice import Choice
from redline.config import Environment
from redline.errors import ConfigError, TrainingError, first_line
from redline.formulas.recompute import Module, Recompute
from redline.units import format_duration

FLAG = "--use-torch-compile"
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch has no other setting; it reads this when it compiles
BACKEND = "inductor"  # tests put "aot_eager" here: it takes the same way and compiles nothing
Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass(slots=True)
class CompileLog:
    """Every graph that was compiled, in order: (for training, seconds)."""

    graphs: list[tuple[bool, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "graphs": len(self.graphs),
            "seconds": sum(seconds for _, seconds in self.graphs),
        }


def compile_blocks(
    layers: nn.ModuleList,
    device_type: str,
    say: Callable[[str], object],
    *,
    environment: Environment,
) -> tuple[CompileLog, Choice]:
    """Have every layer compiled at its first call. Parameters, names and eager results stay as they are.

    Args:
        say: told before and after each compilation, which may take minutes.
        environment: where compiled code is kept for later runs.

    Raises: ConfigError when nothing can be compiled here.
    """
    if reason := why_not(device_type):
        raise ConfigError(
            f"{FLAG}: nothing can be compiled here.", f"{reason}.", f"install it, or leave {FLAG} out."
        )
    kept = keep_compiled(environment)
    log = CompileLog()
    compiler = announced(BACKEND, log, say)
    for layer in layers:
        layer.compile(backend=compiler, fullgraph=True, dynamic=False)
    return log, Choice("torch-compile", "on", BACKEND, f"one graph for all {len(layers)} layers, {kept}")


def kept_modules(attention: Attention, recompute: Recompute) -> tuple[frozenset[Module], tuple[Choice, ...]]:
    """The modules that compiled blocks do not drop with this attention, and the record where they are named.

    The compiler takes PyTorch's attention kernels for random ones, dropout or not, and repeats them with
    states of a generator: on a CPU backward then fails at the versions of main_grad, and no recorded CUDA
    graph could hold them. Of such a kernel recompute would drop its log-sum-exp alone.
    """
    if not is_sdpa(attention):
        return frozenset(), ()
    why = "compiled blocks do not repeat PyTorch's attention kernels, which keep a log-sum-exp and no scores"
    named = recompute.drops("core_attn")
    record = Choice("recompute-core-attn", "dropped", "kept", why)
    return frozenset({"core_attn"}), (record,) if named else ()


def why_not(device_type: str) -> str | None:
    """Why the compiler cannot make code for this device, or None."""
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "PyTorch finds no Triton that can compile for this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # the compiler's own kind of exception; what it says is the reason
        return f"PyTorch finds no C++ compiler ({first_line(error)})"
    return None


def announced(backend: str, log: CompileLog, say: Callable[[str], object]) -> Backend:
    """The backend, with a line before and after each graph: a second graph for training should be noticed."""
    from torch._dynamo import lookup_backend

    compiler = lookup_backend(backend)

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        training = torch.is_grad_enabled()
        name = f"graph {len(log.graphs) + 1}, for {'training' if training else 'evaluation'}"
        say(f"compiling a block: {name}; the first time this can take a minute or more.")
        started = time.perf_counter()
        with marks_inside():
            compiled: Callable[..., Any] = compiler(graph, inputs)
        log.graphs.append((training, time.perf_counter() - started))
        say(f"compiled: {name}, in {format_duration(log.graphs[-1][1])}.")
        return compiled

    return compile_graph


def keep_compiled(environment: Environment) -> str:
    """Keep compiled code where the environment says, else in Redline's cache; says where it lies."""
    folder = environment.torchinductor_cache_dir or environment.cache_dir / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"not kept for later runs: {folder}: {error.strerror or error}"
    os.environ[CACHE_VARIABLE] = str(folder)
    return f"kept in {folder}"


@contextmanager
def compile_failure_explained() -> Iterator[None]:
    """Turn a failed compilation into an error that says what failed. Nothing ever runs eagerly instead."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        cause = getattr(error, "inner_exception", None) or error
        first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise TrainingError(
            f"{FLAG}: a block could not be compiled.",
            why=f"{type(cause).__name__}: {first.strip().rstrip('.')}.",
            mend=f"leave {FLAG} out; TORCH_LOGS=dynamo,inductor shows what the compiler did.",
        ) from error
