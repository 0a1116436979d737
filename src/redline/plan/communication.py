"""Environment variables of CUDA and NCCL: which a layout needs, and which stand in its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from redline.config import RunConfig

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
FAST_LINKS_OFF = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_NET_GDR_DISABLE": "1",
}
# variable -> values and what they do to a run
HARMFUL = {
    **{name: ((value,), "it keeps NCCL from the fast links") for name, value in FAST_LINKS_OFF.items()},
    "NCCL_IB_DISABLE": (("1",), "it keeps NCCL from InfiniBand"),
    "NCCL_NET": (("socket", "Socket"), "it keeps NCCL from InfiniBand"),
    "NCCL_BLOCKING_WAIT": (("1",), "the host then waits for every collective, and nothing overlaps"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the host then waits for every collective, and nothing overlaps"),
    "NCCL_ASYNC_ERROR_HANDLING": (("0",), "an error of NCCL then ends no process"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0",), "an error of NCCL then ends no process"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "it writes a log of everything NCCL does"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel then waits for the one before, and nothing overlaps"),
}

HOLDS_UP = "a sum across instances, which waits for the one inside, holds backward's kernels up with it"


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable that the run sets where the user has not."""

    name: str
    value: str
    why: str


def _instances(config: RunConfig) -> bool:
    """Whether sums inside an instance are followed by sums across them, behind backward."""
    p = config.parallel
    return p.num_distributed_optimizer_instances > 1 and config.overlap.overlap_grad_reduce is not False


def wanted_settings(config: RunConfig) -> Iterator[Setting]:
    """What several GPUs of this layout need; to be set before CUDA starts."""
    if config.overlap.tp_comm_overlap and config.overlap.tp_comm_overlap_method == "chunked":
        why = "a piece is sent before the GEMM that was launched after it"
        yield Setting(QUEUES, "1", f"{why}; {HOLDS_UP}" if _instances(config) else why)
    if config.train.deterministic_mode:
        yield Setting("NCCL_ALGO", "^NVLS", "sums inside NVLink's switches have no fixed order")
    if path := config.runtime.flight_recorder_dump_path:
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            yield Setting(name, path, "--flight-recorder-dump-path")


def complaints(config: RunConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each variable of the user's that harms a run on several GPUs."""
    for name, (values, harm) in HARMFUL.items():
        if environment.get(name) in values:
            yield f"{name}={environment[name]} is set: {harm}; unset it if that is not meant."
    if _instances(config) and environment.get(QUEUES) == "1":
        yield f"{QUEUES}=1 is set: {HOLDS_UP}; better unset it."
    for setting in wanted_settings(config):
        value = environment.get(setting.name)
        if value is None or setting.why.startswith("--"):
            continue
        other = "nvls" in value.lower() and not value.startswith("^")
        if value != setting.value and (setting.name == QUEUES or other):
            yield f"{setting.name}={value} is set, not {setting.value}: {setting.why}; better unset it."
