"""[runtime]: the device, and the environment: the only place that reads environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.problems import Problem, raise_problems
from redline.config.waits import LOGGING, SEVERAL_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(Section):
    """Where the run computes."""

    title: ClassVar[str] = "Runtime"
    account: ClassVar[str] = "host"

    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", short=True, own=True, help="Device of the run; auto: a GPU where there is one."
    )
    threads: int | None = flag(
        None, at_least=1, own=True, help="CPU threads of an operator; unset: OMP_NUM_THREADS, else all cores."
    )
    flight_recorder_dump_path: str | None = flag(
        None, metavar="FILE", waits_for=LOGGING, help="Where a hung collective leaves its record."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment variables that concern a run, read once.

    `nccl` holds every NCCL_* and TORCH_NCCL_* variable, `transformer_engine` every NVTE_* one, by name.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    omp_num_threads: int | None = None
    cuda_device_max_connections: int | None = None
    cuda_visible_devices: str | None = None
    cublas_workspace_config: str | None = None
    pytorch_alloc_conf: str | None = None
    no_color: bool = False
    triton_interpret: bool = False
    cache_dir: Path = Path(".cache/redline")
    nccl: tuple[tuple[str, str], ...] = ()
    transformer_engine: tuple[tuple[str, str], ...] = ()

    def problems(self) -> list[Problem]:
        """What this environment asks for that training cannot obey: more than one process."""
        if self.world_size == 1:
            return []
        what = f"WORLD_SIZE={self.world_size} is not available yet."
        return [Problem(SEVERAL_RANKS.rule, what, SEVERAL_RANKS.why, "start one process, without torchrun.")]


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The Environment of this process, or of `environ`.

    Raises: InvalidConfigError when a variable that must be a whole number is not.
    """
    env = os.environ if environ is None else environ
    problems: list[Problem] = []

    def number(name: str, least: int) -> int | None:
        text = env.get(name, "")
        if not text:
            return None
        if text.strip().isdecimal() and int(text) >= least:
            return int(text)
        what = f"the environment variable {name} is {text!r}."
        problems.append(
            Problem("environment", what, f"it must be a whole number of at least {least}.", f"unset {name}.")
        )
        return None

    def starting(*prefixes: str) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((name, value) for name, value in env.items() if name.startswith(prefixes)))

    caches = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or ".", ".cache")
    found = Environment(
        rank=number("RANK", 0) or 0,
        world_size=number("WORLD_SIZE", 1) or 1,
        local_rank=number("LOCAL_RANK", 0) or 0,
        local_world_size=number("LOCAL_WORLD_SIZE", 1) or 1,
        master_addr=env.get("MASTER_ADDR"),
        master_port=number("MASTER_PORT", 0),
        omp_num_threads=number("OMP_NUM_THREADS", 1),
        cuda_device_max_connections=number("CUDA_DEVICE_MAX_CONNECTIONS", 1),
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        cublas_workspace_config=env.get("CUBLAS_WORKSPACE_CONFIG"),
        pytorch_alloc_conf=env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF"),
        no_color=bool(env.get("NO_COLOR")),
        triton_interpret=env.get("TRITON_INTERPRET", "0") not in ("", "0"),
        cache_dir=Path(caches) / "redline",
        nccl=starting("NCCL_", "TORCH_NCCL_"),
        transformer_engine=starting("NVTE_"),
    )
    raise_problems(problems)
    return found
