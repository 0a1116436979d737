"""How much memory training takes: the number that stands beside the predicted one."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from redline.config import InvalidConfigError, LoggingConfig, Problem, RunConfig
from redline.errors import TrainingError
from redline.files import os_errors_as
from redline.hardware import Hardware, available_memory, usable_memory
from redline.optim import FlatBuffers, Kind
from redline.plan import Plan
from redline.plan.host_memory import host_shares, host_warning
from redline.plan.lighter import advice, least_needed, lighter_changes
from redline.step import TrainStep
from redline.step.saved import SavedCount, count_next_step
from redline.units import format_bytes

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# As formulas/state.py names them.
STATE_CLASSES: dict[str, tuple[Kind, ...]] = {
    "weights": ("param",),
    "main_params": ("main_param",),
    "main_grads": ("main_grad",),
    "exp_avg": ("exp_avg", "exp_avg_top"),
    "exp_avg_sq": ("exp_avg_sq", "exp_avg_sq_top"),
}
CPU_FAILURE = "DefaultCPUAllocator"
# What says that memory ran out where no type does: PyTorch on the CPU; CUDA (pinned memory and launches fail
# as torch.AcceleratorError), Triton and NCCL; cuBLAS.
FAILURES = (CPU_FAILURE, "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
RESET_PEAK = "5"  # proc(5): writing 5 sets VmHWM back to the current resident size


class MemoryMeter:
    """Peak and current memory of a run, counted from its construction.

    On a GPU: what PyTorch's allocator handed out. On a CPU, which has no such counter: growth of the
    process's resident size, so whatever else the process does in that time is counted too.

    Attributes:
        forward_bytes: the most that was in use when a forward pass had ended, all saved for its backward; 0
            where that was not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forward_bytes = 0
        if device.type == "cuda":
            self.measure = "peak allocated by PyTorch on the GPU"
            return
        self._resets = _reset_peak()
        self._before = _resident("VmRSS") if self._resets else _max_rss()
        self.measure = "peak growth of the process's resident memory"

    def forget_peak(self) -> None:
        """Count the peak from now on: drawing weights and loading files need memory that steps do not."""
        self.forward_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._resets:
            _reset_peak()

    def after_forward(self) -> None:
        """Note what is in use: to be called when a forward pass has ended. A counter of the host is read."""
        if self.device.type == "cuda":
            self.forward_bytes = max(self.forward_bytes, torch.cuda.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        """The most that was in use at once."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, (_resident("VmHWM") if self._resets else _max_rss()) - self._before)

    def now_bytes(self) -> int | None:
        """What is in use now; None where the system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return max(0, _resident("VmRSS") - self._before) if self._resets else None


def _reset_peak() -> bool:
    """Set the process's peak back; False where the system offers no such thing (outside Linux)."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured_memory(
    meter: MemoryMeter, buffers: FlatBuffers, beside: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The peak by class: what is always held, by the size of its buffers, and what a step adds to it.

    Args:
        beside: what is held all the time in no flat buffer, by class: casts of weights, and the room through
            which optimizer states pass that a GPU has in host memory (those states themselves do not count).

    On a GPU also what the allocator keeps in reserve beside the peak. On a CPU the peak is the growth of the
    process, so that "activations and workspace" is what remains of that.
    """
    held: dict[str, int] = {}
    seen: set[int] = set()
    for name, kinds in STATE_CLASSES.items():
        flats = [
            flat
            for buffer in (*buffers.buffers, *buffers.shards)
            for kind, flat in buffer.tensors.items()
            if kind in kinds and flat.device.type == meter.device.type
        ]
        found = {flat.untyped_storage().data_ptr(): flat.untyped_storage().nbytes() for flat in flats}
        held[name] = sum(size for place, size in found.items() if place not in seen)
        seen |= found.keys()
    held |= {name: size for name, size in (beside or {}).items() if size}
    peak = meter.peak_bytes()
    held["activations_and_workspace"] = max(0, peak - sum(held.values()))
    if meter.device.type == "cuda":
        held["kept_in_reserve"] = max(0, torch.cuda.max_memory_reserved(meter.device) - peak)
    return held


def count_saved(step: TrainStep, config: RunConfig) -> SavedCount | str:
    """Have the first step count what it saves for backward by module; or why that cannot be known."""
    if config.compile.use_torch_compile:
        return "blocks run as graphs of torch.compile, which hooks on what is saved would change"
    if config.kernels.transformer_impl == "transformer_engine":
        return "the modules of transformer-engine save for several sites at once"
    return count_next_step(step)


def measured_activations(saved: SavedCount | str | None) -> dict[str, Any] | None:
    """For the summary: bytes "by_module", or why they are "unknown"; None where nobody counted."""
    if isinstance(saved, str):
        return {"by_module": None, "unknown": saved}
    if saved is None or not saved.by_module:
        return None
    return {"by_module": saved.by_module, "unknown": None}


@contextmanager
def out_of_memory_explained(config: RunConfig, plan: Plan, hardware: Hardware, ranks: int) -> Iterator[None]:
    """Turn an allocator's failure into an error: what was predicted, what is there, and what would fit.

    Args:
        ranks: that share this host.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        needed, there = plan.memory.reserved, _available(hardware)
        host = usable_memory() // ranks
        limit = least_needed(plan.memory, there, failed=True)
        changes = lighter_changes(config, plan, hardware, limit, host_limit_bytes=host)
        said, stage = _first_sentence(str(error)), plan.memory.fullest
        if stage.host_total and not isinstance(error, torch.OutOfMemoryError):
            said += f" (or the host has none: {' and '.join(host_shares(stage))} are there)"
        raise TrainingError(
            f"{hardware.name} has no memory left for this run.",
            why=f"{said}; {format_bytes(needed)} were predicted, and {format_bytes(there)} are available.",
            mend=f"{advice(changes)}; `redline memory` shows what takes it.",
        ) from error


def warnings_of_memory(config: RunConfig, plan: Plan, hardware: Hardware, ranks: int) -> Iterator[str]:
    """What to say before anything is allocated for a run that is predicted not to fit.

    Args:
        ranks: that share this host.
    """
    free = available_memory()
    too_large = warning_if_too_large(config, plan, hardware, free // ranks)
    if too_large is not None:
        yield too_large
    if hardware.kind != "cpu" or too_large is None:  # a CPU's memory is the host's
        host = host_warning(plan, hardware, ranks, free)
        yield from () if host is None else (host,)


def warning_if_too_large(
    config: RunConfig, plan: Plan, hardware: Hardware, host_bytes: int | None = None
) -> str | None:
    """What to say of a device on which the run does not fit; `host_bytes` are its rank's of the host."""
    needed, there = plan.memory.reserved, _available(hardware)
    if hardware.kind == "cuda":  # this process has its context by now, which the prediction counts
        there = min(hardware.memory_bytes, there + plan.memory.fullest.context)
    if needed <= there:
        return None
    free = " free" if there < hardware.memory_bytes else ""
    changes = lighter_changes(config, plan, hardware, there, host_limit_bytes=host_bytes)
    return (
        f"warning: this run is predicted to need {format_bytes(needed)}, and {hardware.name} has "
        f"{format_bytes(there)}{free}; {advice(changes)}; `redline memory` with these options shows what "
        "takes it."
    )


def _first_sentence(text: str) -> str:
    """Of what the allocator says: PyTorch's on the CPU puts a place in its source before, NCCL much else."""
    lines = text.splitlines() or [""]
    line = next((line for line in lines if any(failure in line for failure in FAILURES)), lines[0])
    sentence = line[max(line.find(CPU_FAILURE), 0) :].split(". ")[0]
    return sentence.rstrip(".") or "an allocation failed"


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out, by its type or by what it says."""
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in FAILURES)


def _available(hardware: Hardware) -> int:
    """What this process could have: on a GPU what is free and what it holds already."""
    if hardware.kind != "cuda":
        return hardware.memory_bytes
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


@contextmanager
def memory_history(options: LoggingConfig, device: torch.device, rank: int) -> Iterator[None]:
    """With --record-memory-history, every allocation inside, in a file that PyTorch's viewer reads.

    The file is written at the end, however that comes: also when memory runs out. Ranks but the first put
    their number before its suffix.

    Raises:
        InvalidConfigError: on a device without an allocator to watch.
        TrainingError: the file cannot be written.
    """
    if not options.record_memory_history:
        yield
        return
    if device.type != "cuda":
        what, why = "--record-memory-history needs a GPU.", "it watches the allocator of the GPU's memory."
        flags = ("--record-memory-history",)
        raise InvalidConfigError([Problem("memory-history-needs-cuda", what, why, "leave it out.", flags)])
    path = Path(options.memory_snapshot_path)
    path = path.with_stem(f"{path.stem}-rank{rank}") if rank else path
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        with os_errors_as(TrainingError, path, "write"):
            torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
