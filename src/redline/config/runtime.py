"""[runtime]: the device, and the environment: the only place that reads environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.problems import Problem, raise_problems
from redline.config.slurm import ranks_from_slurm

LAUNCHER_DIR = "REDLINE_LAUNCHER_DIR"  # set by comm/elastic.py


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
    nproc_per_node: int | None = flag(
        None,
        at_least=1,
        own=True,
        short=True,
        help="Start this many processes here (torch elastic); unset: one, or what torchrun or Slurm started.",
    )
    max_restarts: int = flag(
        0,
        at_least=0,
        own=True,
        needs={"nproc_per_node": SET},
        help="Start again, from the newest checkpoint, after this many failures.",
    )
    flight_recorder_dump_path: str | None = flag(
        None,
        metavar="PREFIX",
        help="Where a job that breaks leaves each rank's newest collectives: PREFIX0, PREFIX1, ...",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment variables that concern a run, read once.

    `launched` says whether torchrun, Slurm or `--nproc-per-node` started this process as one of several, or
    alone; `attempt` counts the restarts of torch elastic, whose agent holds the store if `agent_store`; all
    attempts of a job share the name `elastic_job`.
    `launcher_dir` is where ranks leave word for the process that started them (comm/elastic.py).
    `nccl` holds every NCCL_*, TORCH_NCCL_* and TORCH_FR_* variable by name,
    `transformer_engine` every NVTE_* one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launched: bool = False
    attempt: int = 0
    elastic_job: str = ""
    agent_store: bool = False
    launcher_dir: Path | None = None
    omp_num_threads: int | None = None
    cuda_device_max_connections: int | None = None
    cuda_launch_blocking: bool = False
    cuda_visible_devices: str | None = None
    cublas_workspace_config: str | None = None
    pytorch_alloc_conf: str | None = None
    torchinductor_cache_dir: Path | None = None
    no_color: bool = False
    triton_interpret: bool = False
    cache_dir: Path = Path(".cache/redline")
    nccl: tuple[tuple[str, str], ...] = ()
    transformer_engine: tuple[tuple[str, str], ...] = ()

    def communication(self) -> dict[str, str]:
        """The variables that change how devices of a job talk to each other, by name."""
        queues = self.cuda_device_max_connections
        found = {} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
        blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if self.cuda_launch_blocking else {}
        return found | blocking | dict(self.nccl)

    def problems(self) -> list[Problem]:
        """What of this environment does not make up a place among the processes of a run."""
        found = []
        if self.rank >= self.world_size:
            what = f"RANK={self.rank} is not below WORLD_SIZE={self.world_size}."
            found.append(Problem("environment", what, "ranks count from 0.", "start with torchrun."))
        if self.world_size > 1 and (self.master_addr is None or self.master_port is None):
            missing = "MASTER_ADDR" if self.master_addr is None else "MASTER_PORT"
            what = f"WORLD_SIZE={self.world_size} is set, but {missing} is not."
            why = "the processes of a run meet at that address."
            mend = f"start with --nproc-per-node {self.world_size}, torchrun or srun, or unset WORLD_SIZE."
            found.append(Problem("environment", what, why, mend))
        return found


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The Environment of this process, or of `environ`.

    Raises: InvalidConfigError when a variable that must be a whole number is not.
    """
    env = dict(os.environ if environ is None else environ)
    env |= ranks_from_slurm(env)
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
        launched="RANK" in env,
        attempt=number("TORCHELASTIC_RESTART_COUNT", 0) or 0,
        elastic_job=env.get("TORCHELASTIC_RUN_ID", ""),
        launcher_dir=Path(kept) if (kept := env.get(LAUNCHER_DIR)) else None,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        omp_num_threads=number("OMP_NUM_THREADS", 1),
        cuda_device_max_connections=number("CUDA_DEVICE_MAX_CONNECTIONS", 1),
        cuda_launch_blocking=env.get("CUDA_LAUNCH_BLOCKING") == "1",
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        cublas_workspace_config=env.get("CUBLAS_WORKSPACE_CONFIG"),
        pytorch_alloc_conf=env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF"),
        torchinductor_cache_dir=Path(kept) if (kept := env.get("TORCHINDUCTOR_CACHE_DIR")) else None,
        no_color=bool(env.get("NO_COLOR")),
        triton_interpret=env.get("TRITON_INTERPRET", "0") not in ("", "0"),
        cache_dir=Path(caches) / "redline",
        nccl=starting("NCCL_", "TORCH_NCCL_", "TORCH_FR_"),
        transformer_engine=starting("NVTE_"),
    )
    raise_problems(problems)
    return found
