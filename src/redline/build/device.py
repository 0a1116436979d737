"""The device of a run, and the process-wide settings that belong to it."""

from __future__ import annotations

import os

import torch

from redline.choice import Choice
from redline.config import Environment, InvalidConfigError, Problem, RuntimeConfig
from redline.errors import ConfigError

CUBLAS_WORKSPACE = ":4096:8"  # what cuBLAS documents as deterministic


def open_device(
    runtime: RuntimeConfig,
    environment: Environment,
    *,
    deterministic: bool,
    empty_cache_level: int,
    graphs: bool = False,
) -> tuple[torch.device, list[Choice]]:
    """Choose the device of this process and set threads and determinism.

    The processes of a machine take a GPU each, and share its cores.

    Must run before the first CUDA call: cuBLAS reads its workspace setting once.

    Raises: ConfigError when --device cuda finds no GPU or too few of them, or when an option asks for what a
        CPU does not have.
    """
    if deterministic:
        if environment.cublas_workspace_config is None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    device, choice = _choose(runtime.device, environment.local_rank)
    if device.type == "cpu" and empty_cache_level:
        raise InvalidConfigError([_no_cache(empty_cache_level)])
    if device.type == "cpu" and graphs:
        raise InvalidConfigError([_no_graphs()])
    sharing = environment.local_world_size
    threads = runtime.threads or environment.omp_num_threads
    why = "as asked" if runtime.threads else "OMP_NUM_THREADS" if threads else "all cores"
    if threads is None and sharing > 1:
        threads, why = max(1, torch.get_num_threads() // sharing), f"all cores, over {sharing} processes"
    if threads:
        torch.set_num_threads(threads)
    return device, [
        choice,
        Choice("threads", str(runtime.threads or "auto"), str(torch.get_num_threads()), why),
    ]


def _choose(asked: str, local_rank: int) -> tuple[torch.device, Choice]:
    """The device called `asked` of this process; auto takes a GPU where there is one."""
    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ConfigError(
            "--device cuda: PyTorch finds no GPU here.",
            why="there is none, its driver is missing, or this PyTorch was built for CPUs.",
            mend="check `nvidia-smi`, or use --device cpu.",
        )
    ran = ("cuda" if found else "cpu") if asked == "auto" else asked
    why = "as asked" if asked != "auto" else "a GPU is there" if found else "PyTorch finds no GPU"
    if ran == "cpu":
        return torch.device(ran), Choice("device", asked, ran, why)
    if local_rank and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local_rank} of this machine finds no GPU of its own: there are "
            f"{torch.cuda.device_count()}.",
            why="every process trains on one GPU.",
            mend=f"start at most {torch.cuda.device_count()} processes here.",
        )
    if local_rank:
        torch.cuda.set_device(local_rank)
    return torch.device(ran, local_rank), Choice("device", asked, ran, why)


def _no_cache(level: int) -> Problem:
    flag = "--empty-unused-memory-level"
    return Problem(
        "cached-device-memory",
        f"{flag} {level} has no effect on a CPU.",
        "only the allocator of a GPU keeps freed memory that could be returned.",
        f"leave {flag} out, or run on a GPU.",
        (flag,),
    )


def _no_graphs() -> Problem:
    flag = "--cuda-graph-impl"
    return Problem(
        "graphs-of-a-gpu",
        f"{flag} local cannot be done on a CPU.",
        "a CUDA graph is a recording of a GPU's kernels.",
        f"leave {flag} out, or run on a GPU.",
        (flag,),
    )
