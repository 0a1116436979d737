"""Memory: whether it fits, and what recompute costs where nothing asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redline.doctor.case import Case
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check
from redline.plan.cost_memory import layer_activation_bytes
from redline.units import GIB

MARGIN = 0.92  # of the card, that a prediction of memory may fill before a recompute is given up
NO_RECOMPUTE = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
SELECTIVE = {**NO_RECOMPUTE, "recompute_granularity": "selective"}
TIGHT = 0.85


def gib(num_bytes: float) -> str:
    """Bytes as a short figure."""
    return f"{num_bytes / GIB:.1f} GiB"


def _room(case: Case, mend: Mend) -> bool:
    after = case.after(mend)
    return (
        after is not None
        and case.hardware is not None
        and (after.memory.total <= MARGIN * case.hardware.memory_bytes)
    )


@check("RL007", "memory", "warning", "recompute_granularity", needs="cost")
def recompute(case: Case) -> Hit | None:
    """7 of the twelve: whole layers recomputed where less would do, or nothing where it does not fit."""
    cost, setup = case.cost, case.setup
    assert cost is not None and setup is not None and case.hardware is not None
    used = {"now": gib(cost.memory.total), "card": gib(case.hardware.memory_bytes)}
    choices = {"full": _lighter, "none": _heavier}.get(setup.recompute)
    if choices is None or (setup.recompute == "none" and case.fits(cost)):
        return None
    fitting = [mend for values in choices(case) if _room(case, mend := Mend(values=values))]
    best = max(fitting, key=case.saved, default=None)
    if best is None or (setup.recompute == "full" and case.saved(best) <= 0):
        return None
    after = case.after(best)
    assert after is not None
    words = used | {"after": gib(after.memory.total)}
    if setup.recompute == "full":
        return Hit(at="recompute_granularity", words=words, mend=best)
    return Hit(at="micro_batch_size", text="oom", severity="error", words=words, mend=best)


def _lighter(case: Case) -> list[dict[str, Any]]:
    """Less recompute than full: none, selective, fewer layers of each chunk."""
    setup = case.setup
    assert setup is not None
    choices: list[dict[str, Any]] = [dict(NO_RECOMPUTE)]
    if setup.attention == "unfused":
        choices.append({**SELECTIVE, "recompute_modules": ("core_attn",)})
    choices.append({**SELECTIVE, "recompute_modules": ("mlp",)})
    chunk = max(1, setup.layers_per_stage // setup.vpp)
    now = setup.recompute_layers if setup.recompute_method == "block" else chunk
    for layers in range(1, min(now, chunk)):
        block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
        choices.append(block)
    return choices


def _heavier(case: Case) -> list[dict[str, Any]]:
    """More recompute than none."""
    setup = case.setup
    assert setup is not None
    chunk = max(1, setup.layers_per_stage // setup.vpp)
    unfused = [{**SELECTIVE, "recompute_modules": ("core_attn",)}] if setup.attention == "unfused" else []
    blocks = [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
        for layers in range(1, chunk + 1)
    ]
    return [*unfused, {**SELECTIVE, "recompute_modules": ("mlp",)}, *blocks]


@check("RL301", "memory", "warning", "recompute_granularity", "recompute_modules")
def pointless_selective(case: Case) -> Hit | None:
    """Selective recompute of attention that keeps no scores."""
    setup = case.setup
    if setup is None or setup.recompute != "selective" or setup.attention == "unfused":
        return None
    if setup.recompute_modules != ("core_attn",):
        return None
    kept = layer_activation_bytes(setup, ()) - layer_activation_bytes(setup)
    mend = Mend(values={"recompute_granularity": None})
    return Hit(
        at="recompute_granularity", words={"saved": gib(kept), "attention": setup.attention}, mend=mend
    )


@check("RL302", "memory", "warning", "recompute_modules", needs="cost")
def recompute_where_free(case: Case) -> Hit | None:
    """Modules recomputed although their activations would fit."""
    setup, cost = case.setup, case.cost
    assert setup is not None and cost is not None and case.hardware is not None
    if setup.recompute != "selective" or set(setup.recompute_modules) <= {"core_attn"}:
        return None
    mend = Mend(values=dict(NO_RECOMPUTE))
    if not _room(case, mend) or case.saved(mend) < 0.01:
        return None
    after = case.after(mend)
    assert after is not None
    words = {"modules": " ".join(setup.recompute_modules), "after": gib(after.memory.total)}
    return Hit(at="recompute_modules", words=words, mend=mend)


@check("RL303", "memory", "error", needs="cost")
def does_not_fit(case: Case) -> Hit | None:
    """More than the card holds."""
    cost, setup = case.cost, case.setup
    assert cost is not None and setup is not None and case.hardware is not None
    if case.fits(cost):
        return None
    memory = cost.memory
    parts = {
        name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "activations", "logits")
    }
    largest = max(parts, key=lambda name: parts[name])
    words = {"total": gib(memory.total), "card": gib(case.hardware.memory_bytes), "largest": largest}
    words["parts"] = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
    return Hit(at="micro_batch_size", words=words, mend=_smaller(case))


def _smaller(case: Case) -> Mend:
    """The first of a few changes with which it fits; an empty mend when none does."""
    micro, tp = case.config.train.micro_batch_size, case.tp
    tries: list[dict[str, Any]] = []
    if case.setup and case.setup.sharding == "none" and (case.dp or 1) > 1:
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        tries.append({"use_distributed_optimizer": True, **overlap})
    if case.tp > 1 and not case.config.parallel.sequence_parallel:
        tries.append({"sequence_parallel": True})
    while micro % 2 == 0:
        micro //= 2
        tries.append({"micro_batch_size": micro})
    while tp * 2 <= case.gpus_per_node:
        tp *= 2
        tries.append({"tensor_model_parallel_size": tp, "sequence_parallel": True})
    for values in tries:
        if case.fits(case.after(Mend(values=values))):
            return Mend(values=values)
    return Mend()


@check("RL304", "memory", "hint", needs="cost")
def expandable_segments(case: Case) -> Hit | None:
    """A full card without the allocator's expandable segments."""
    cost, setting = case.cost, case.env("PYTORCH_CUDA_ALLOC_CONF") or case.env("PYTORCH_ALLOC_CONF") or ""
    assert cost is not None and case.hardware is not None
    if "expandable_segments:True" in setting or cost.memory.total < TIGHT * case.hardware.memory_bytes:
        return None
    if case.config.overlap.use_nccl_ub:
        return None
    value = f"{setting},expandable_segments:True" if setting else "expandable_segments:True"
    words = {"share": f"{cost.memory.total / case.hardware.memory_bytes:.0%}"}
    return Hit(
        at="PYTORCH_CUDA_ALLOC_CONF", words=words, mend=Mend(environment={"PYTORCH_CUDA_ALLOC_CONF": value})
    )


@check("RL305", "memory", "error", "distribute_saved_activations")
def spread_activations(case: Case) -> Hit | None:
    """Saved activations spread over tp, which sequence parallelism has done already."""
    if not case.config.recompute.distribute_saved_activations or not case.config.parallel.sequence_parallel:
        return None
    mend = Mend(values={"distribute_saved_activations": False})
    return Hit(at="distribute_saved_activations", mend=mend)


@check("RL306", "memory", "warning", "recompute_num_layers")
def recompute_units(case: Case) -> Hit | None:
    """Full recompute whose number of layers does not mean what it seems."""
    r, setup = case.config.recompute, case.setup
    if setup is None or r.recompute_granularity != "full" or r.recompute_num_layers is None:
        return None
    chunk = setup.layers_per_stage / setup.vpp
    words = {"number": r.recompute_num_layers, "chunk": f"{chunk:g}", "vpp": setup.vpp}
    if r.recompute_method == "block" and r.recompute_num_layers > chunk:
        mend = Mend(values={"recompute_num_layers": int(chunk)})
        return Hit(at="recompute_num_layers", words=words, mend=mend)
    if r.recompute_method == "uniform" and r.recompute_num_layers > 4:
        mend = Mend(values={"recompute_num_layers": 1})
        return Hit(at="recompute_num_layers", words=words, text="uniform", severity="hint", mend=mend)
    return None


@check("RL307", "memory", "warning", "cpu_offloading", "optimizer_cpu_offload")
def offloading(case: Case) -> Hit | None:
    """Activations or optimizer states travel over PCIe."""
    at, values = "cpu_offloading", {"cpu_offloading": False, "cpu_offloading_num_layers": 0}
    if case.config.optim.optimizer_cpu_offload:
        at, values = "optimizer_cpu_offload", {"optimizer_cpu_offload": False}
    elif not case.config.recompute.cpu_offloading:
        return None
    room = case.setup is not None and case.fits(case.cost)
    words = {"flag": f"--{at.replace('_', '-')}"}
    return Hit(at=at, words=words, mend=Mend(values=values) if room else Mend())


@check("RL308", "memory", "warning", "empty_unused_memory_level")
def empty_cache(case: Case) -> Hit | None:
    """The allocator's cache is given back every step."""
    level = case.get("empty_unused_memory_level")
    if not level:
        return None
    mend = Mend(values={"empty_unused_memory_level": 0})
    return Hit(at="empty_unused_memory_level", words={"level": level}, mend=mend)


@check("RL309", "memory", "hint", "recompute_granularity", needs="cost")
def recompute_options(case: Case) -> Hit | None:
    """What each recompute choice would save and cost for this very model."""
    setup = case.setup
    assert setup is not None and case.cost is not None and case.hardware is not None
    if case.cost.memory.total < MARGIN * case.hardware.memory_bytes and setup.recompute == "none":
        return None
    if setup.recompute == "none" and case.fits(case.cost) is False:
        return None  # RL303 speaks then
    table = []
    for name, values in (
        ("none", NO_RECOMPUTE),
        ("selective core_attn", {**SELECTIVE, "recompute_modules": ("core_attn",)}),
        ("selective mlp", {**SELECTIVE, "recompute_modules": ("mlp",)}),
        ("full", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ):
        after = case.after(Mend(values=values))
        if after is not None:
            change = after.step_s / case.cost.step_s - 1
            table.append(f"{name}: {gib(after.memory.total)}, {change:+.0%}")
    return Hit(at="recompute_granularity", words={"table": "; ".join(table)})


@check("RL310", "memory", "warning", "use_torch_fsdp2", "use_megatron_fsdp", needs="cost")
def sharding_beyond_need(case: Case) -> Hit | None:
    """Parameters sharded and gathered for every microbatch although they fit."""
    setup = case.setup
    assert setup is not None
    if setup.sharding != "parameters" or setup.num_microbatches == 1:
        return None
    held = replace(setup, sharding="optimizer")
    values = {
        "use_torch_fsdp2": False,
        "use_megatron_fsdp": False,
        "data_parallel_sharding_strategy": "no_shard",
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    mend = Mend(values=values)
    if not _room(case, mend) or case.saved(mend) < 0.02:
        return None
    words = {"times": held.num_microbatches}
    return Hit(
        at="use_torch_fsdp2" if case.config.parallel.use_torch_fsdp2 else "use_megatron_fsdp",
        words=words,
        mend=mend,
    )
