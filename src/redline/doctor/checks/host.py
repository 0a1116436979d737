"""Host: launches, logging, checkpoints, data, garbage, profilers, and variables that serialise it all."""

from __future__ import annotations

from collections.abc import Iterator

from redline.doctor.case import Case
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check

WORTH = 0.01
# variable -> values that cost (None: any value but 0)
SLOW_VARIABLES: dict[str, tuple[str, ...]] = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE", "INFO"),
    "TORCH_SHOW_CPP_STACKTRACES": (),
    "NCCL_BLOCKING_WAIT": ("1",),
    "TORCH_NCCL_BLOCKING_WAIT": ("1",),
    "TORCH_NCCL_ENABLE_TIMING": ("1",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "CUDA_MEMCHECK": ("1",),
}
SERIOUS = frozenset(("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"))


@check("RL401", "host", "warning", "log_interval", "log_params_norm", "log_num_zeros_in_grad")
def logging_every_step(case: Case) -> Hit | None:
    """Every step is logged, with norms that read all parameters."""
    heavy = [name for name in ("log_params_norm", "log_num_zeros_in_grad") if case.get(name)]
    if case.get("log_interval") != 1 or (case.dialect == "redline" and not heavy):
        return None
    words = {"flags": " ".join(["--log-interval 1", *("--" + name.replace("_", "-") for name in heavy)])}
    values = {"log_interval": 10, **dict.fromkeys(heavy, False)}
    severity = "warning" if heavy else "hint"
    return Hit(at="log_interval", words=words, severity=severity, mend=Mend(values=values))  # type: ignore[arg-type]


@check("RL402", "host", "warning", "timing_log_level")
def timers(case: Case) -> Hit | None:
    """Timers that synchronise inside the step."""
    level = case.get("timing_log_level")
    if level < 2:
        return None
    return Hit(at="timing_log_level", words={"level": level}, mend=Mend(values={"timing_log_level": 0}))


@check("RL403", "host", "warning", "async_save", "save_interval")
def blocking_saves(case: Case) -> Hit | None:
    """The job stands still while a checkpoint is written."""
    interval = case.config.checkpoint.save_interval
    if not case.config.checkpoint.save or case.get("async_save") or interval is None:
        return None
    ckpt_format = case.get("ckpt_format")
    mend = Mend(values={"async_save": True})
    if ckpt_format == "torch":
        mend = Mend(values={"async_save": True, "ckpt_format": "torch_dist"})
    severity = "warning" if interval <= 1000 else "hint"
    return Hit(at="save_interval", words={"interval": interval}, severity=severity, mend=mend)  # type: ignore[arg-type]


@check("RL404", "host", "warning", "num_workers")
def workers(case: Case) -> Hit | None:
    """The step waits for its batch, or dozens of workers wait for a core."""
    number = case.get("num_workers")
    if 0 < number <= 16:
        return None
    return Hit(at="num_workers", words={"number": number}, mend=Mend(values={"num_workers": 4}))


@check("RL405", "host", "hint", "manual_gc", "manual_gc_interval")
def garbage(case: Case) -> Hit | None:
    """Each rank collects Python's garbage at a moment of its own, and all wait for it."""
    if case.get("manual_gc") or (case.world_size or 1) < 16 or case.dialect == "redline":
        return None
    mend = Mend(values={"manual_gc": True, "manual_gc_interval": 100})
    return Hit(at="manual_gc", words={"gpus": case.world_size}, mend=mend)


@check("RL406", "host", "hint", "check_for_nan_in_loss_and_grad", "rerun_mode")
def nan_checks(case: Case) -> Hit | None:
    """Every microbatch's loss and every bucket is inspected, and the host waits for the answer."""
    rerun = case.dialect == "megatron" and case.get("rerun_mode") != "disabled"
    if case.dialect == "redline" or not (case.get("check_for_nan_in_loss_and_grad") and rerun):
        return None
    return Hit(at="rerun_mode", mend=Mend(values={"rerun_mode": "disabled"}))


@check("RL407", "host", "warning", "eval_iters", "eval_interval")
def evaluation(case: Case) -> Hit | None:
    """Evaluation takes a noticeable part of the run."""
    iters, interval = case.get("eval_iters"), case.config.train.eval_interval
    if not iters or not interval:
        return None
    share = iters / 3 / (interval + iters / 3)  # forward alone is a third of a step
    if share < 0.03:
        return None
    less = max(1, round(0.02 * interval * 3))
    words = {"iters": iters, "interval": interval, "share": f"{share:.0%}", "less": less}
    saved = 1 - (interval + less / 3) / (interval + iters / 3)
    return Hit(at="eval_iters", words=words, share=saved, mend=Mend(values={"eval_iters": less}))


@check("RL408", "host", "warning", "use_torch_compile")
def compile_and_lengths(case: Case) -> Hit | None:
    """A compiled model that meets a new length compiles again."""
    varying = case.uses("--variable-seq-lengths")
    if not case.config.compile.use_torch_compile or not varying:
        return None
    return Hit(at="use_torch_compile", words={"flag": varying.flag})


@check("RL409", "host", "warning", "cuda_graph_impl", needs="cost")
def launch_bound(case: Case) -> Hit | None:
    """The device waits for the host to start kernels."""
    cost = case.cost
    assert cost is not None
    share = cost.parts.get("launch", 0.0) / cost.step_s
    if share < 0.03:
        return None
    mend = Mend(values={"cuda_graph_impl": "transformer_engine"})
    if case.dialect == "redline":
        mend = _fewer_launches(case)
    return Hit(at="micro_batch_size", words={"share": f"{share:.0%}"}, mend=mend)


def _fewer_launches(case: Case) -> Mend:
    """Compile, which goes with more; then record, which one process can; none where the rules refuse both."""
    compiled, recorded = (
        Mend(values=each) for each in ({"use_torch_compile": True}, {"cuda_graph_impl": "local"})
    )
    if not case.config.compile.use_torch_compile and case.obeyed(compiled):
        return compiled
    alone = case.world_size == 1 and case.config.compile.cuda_graph_impl == "none"
    return recorded if alone and case.obeyed(recorded) else Mend()


@check("RL410", "host", "warning", "profile", "record_memory_history")
def profilers(case: Case) -> Iterator[Hit]:
    """A profiler that was left on."""
    for name in ("profile", "record_memory_history", "nvtx_ranges"):
        if case.get(name):
            yield Hit(at=name, words={"flag": "--" + name.replace("_", "-")}, mend=Mend(values={name: False}))


@check("RL411", "host", "warning", needs="environment")
def slow_variables(case: Case) -> Iterator[Hit]:
    """Debugging variables that serialise or slow the run."""
    for name, values in SLOW_VARIABLES.items():
        value = case.env(name)
        if value is not None and value.upper() in values:
            severity = "error" if name in SERIOUS else "hint" if name == "NCCL_DEBUG" else "warning"
            mend = Mend(environment={name: "WARN" if name == "NCCL_DEBUG" else None})
            yield Hit(at=name, words={"name": name, "value": value}, severity=severity, mend=mend)  # type: ignore[arg-type]


@check("RL412", "host", "hint", needs="environment")
def threads(case: Case) -> Hit | None:
    """CPU threads of each rank: so many that ranks crowd each other out."""
    value = case.env("OMP_NUM_THREADS")
    if value is None or not value.isdecimal() or int(value) <= 32:
        return None
    return Hit(at="OMP_NUM_THREADS", words={"value": value}, mend=Mend(environment={"OMP_NUM_THREADS": "8"}))


@check("RL413", "host", "hint", "log_throughput")
def throughput(case: Case) -> Hit | None:
    """The log does not say how fast it is."""
    if case.dialect == "redline" or case.get("log_throughput"):
        return None
    return Hit(at="log_throughput", mend=Mend(values={"log_throughput": True}))


@check("RL414", "host", "hint", "mmap_bin_files", "data_cache_path")
def reading(case: Case) -> Hit | None:
    """Token files are read through the page cache by copies."""
    if case.get("mmap_bin_files"):
        return None
    return Hit(at="mmap_bin_files", mend=Mend(values={"mmap_bin_files": True}))
