"""Communication: data, tensor, pipeline, context and expert parallelism, and what hides it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redline.doctor.case import CDMC, Case
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check
from redline.formulas.time import bubble_share
from redline.hardware import BLACKWELL
from redline.plan.cost_setup import virtual_stages

WORTH = 0.01


@check("RL004", "memory", "warning", "use_distributed_optimizer")
def distributed_optimizer(case: Case) -> Hit | None:
    """4 of the twelve: every data-parallel rank holds all optimizer states."""
    if case.config.parallel.use_distributed_optimizer or case.fsdp or (case.dp or 1) == 1:
        return None
    values = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    return Hit(at="tensor_model_parallel_size", words={"dp": case.dp}, mend=Mend(values=values))


@check("RL005", "communication", "warning", "overlap_grad_reduce", "overlap_param_gather")
def overlaps(case: Case) -> Hit | None:
    """5 of the twelve: gradients and parameters travel in the open."""
    if (case.dp or 1) * case.cp == 1 or case.fsdp:
        return None
    sharded = case.config.parallel.use_distributed_optimizer
    missing: dict[str, Any] = {}
    if not case.on("overlap_grad_reduce"):
        missing["overlap_grad_reduce"] = True
    if sharded and not case.on("overlap_param_gather"):
        missing["overlap_param_gather"] = True
    if not missing:
        return None
    flags = " ".join("--" + name.replace("_", "-") for name in missing)
    at = "use_distributed_optimizer" if sharded else "tensor_model_parallel_size"
    return Hit(at=at, words={"flags": flags, "dp": (case.dp or 1) * case.cp}, mend=Mend(values=missing))


@check("RL006", "communication", "warning", "sequence_parallel", "tensor_model_parallel_size")
def sequence_parallel(case: Case) -> Hit | None:
    """6 of the twelve: tensor parallelism without sequence parallelism."""
    if case.tp == 1 or case.config.parallel.sequence_parallel:
        return None
    queue = {CDMC: "1"} if case.needs_one_queue and case.dialect == "megatron" else {}
    unset = {name: value for name, value in queue.items() if case.env(name) != value}
    values = {"sequence_parallel": True, "distribute_saved_activations": False}
    mend = Mend(values=values, environment=unset)
    return Hit(at="tensor_model_parallel_size", words={"tp": case.tp}, mend=mend)


@check("RL008", "communication", "warning")
def one_hardware_queue(case: Case) -> Hit | None:
    """8 of the twelve: CUDA_DEVICE_MAX_CONNECTIONS, where it has to be 1, and where it must not be."""
    if case.dialect == "redline":
        return None
    value, mend = case.env(CDMC), Mend(environment={CDMC: "1"})
    words = {"value": value or "-", "tp": case.tp, "cp": case.cp}
    if case.fsdp and value == "1":
        return Hit(at=CDMC, words=words, text="fsdp", severity="error", mend=Mend(environment={CDMC: None}))
    if value == "1" and case.config.moe.overlap_moe_expert_parallel_comm:
        return Hit(at=CDMC, words=words, text="experts", mend=Mend(environment={CDMC: "32"}))
    if value == "1" and case.at_least(BLACKWELL) and case.tp * case.cp > 1:
        return Hit(at=CDMC, words=words, text="blackwell", severity="hint")
    if not case.needs_one_queue or value == "1":
        return None
    if value is None:
        at = "tensor_model_parallel_size" if case.tp > 1 else "context_parallel_size"
        return Hit(at=at, words=words, text="unset", mend=mend)
    return Hit(at=CDMC, words=words, severity="error", mend=mend)


@check("RL010", "communication", "warning", "pipeline_model_parallel_size", "global_batch_size")
def enough_microbatches(case: Case) -> Hit | None:
    """10 of the twelve: too few microbatches to fill the pipeline."""
    number, pp = case.microbatches, case.pp
    if pp == 1 or number is None or case.dp is None or number >= 4 * pp:
        return None
    vpp, train = virtual_stages(case.config), case.config.train
    bubble = bubble_share(pp, vpp, number)
    size = 4 * pp * train.micro_batch_size * case.dp
    words = {
        "number": number,
        "wanted": 4 * pp,
        "pp": pp,
        "bubble": f"{bubble / (1 + bubble):.0%}",
        "size": size,
    }
    words["after"] = f"{bubble_share(pp, vpp, 4 * pp) / (1 + bubble_share(pp, vpp, 4 * pp)):.0%}"
    if train.micro_batch_size > 1 and train.micro_batch_size % 2 == 0:
        half = Mend(values={"micro_batch_size": train.micro_batch_size // 2})
        if case.saved(half) > WORTH:
            return Hit(at="micro_batch_size", words=words, mend=half)
    severity = "hint" if bubble < 0.05 else "warning"
    mend = Mend(values={"global_batch_size": size}, safe=False)
    return Hit(at="global_batch_size", words=words, severity=severity, mend=mend)  # type: ignore[arg-type]


@check("RL201", "communication", "error", "tensor_model_parallel_size")
def tp_across_nodes(case: Case) -> Hit | None:
    """Tensor parallelism over the network."""
    if case.tp <= case.gpus_per_node:
        return None
    values: dict[str, Any] = {"tensor_model_parallel_size": case.gpus_per_node}
    factor = case.tp // case.gpus_per_node
    if case.config.model.num_layers % (case.pp * factor) == 0:
        values["pipeline_model_parallel_size"] = case.pp * factor
    words = {"tp": case.tp, "node": case.gpus_per_node}
    return Hit(at="tensor_model_parallel_size", words=words, mend=Mend(values=values))


@check("RL202", "communication", "error", "num_query_groups", "num_attention_heads")
def tp_and_groups(case: Case) -> Hit | None:
    """Query groups that tp ranks do not share evenly, or must copy."""
    model, tp = case.config.model, case.tp
    heads = model.num_attention_heads
    groups = (model.num_query_groups or 1) if model.group_query_attention else heads
    words = {"tp": tp, "groups": groups, "heads": heads}
    if heads % tp or (groups % tp and tp % groups):
        return Hit(at="tensor_model_parallel_size", words=words)
    if tp > groups:
        return Hit(at="num_query_groups", words=words, text="copied", severity="hint")
    return None


@check("RL203", "communication", "error", "tp_comm_overlap", "sequence_parallel")
def tp_overlap_prerequisites(case: Case) -> Hit | None:
    """B065: --tp-comm-overlap needs sequence parallelism, tp above 1 and Transformer Engine."""
    if not case.config.overlap.tp_comm_overlap:
        return None
    if case.tp == 1:
        mend = Mend(values={"tp_comm_overlap": False})
        return Hit(at="tp_comm_overlap", words={"lacks": "--tensor-model-parallel-size > 1"}, mend=mend)
    if not case.config.parallel.sequence_parallel:
        mend = Mend(values={"sequence_parallel": True})
        return Hit(at="tp_comm_overlap", words={"lacks": "--sequence-parallel"}, mend=mend)
    if case.get("transformer_impl") == "local" and case.dialect == "megatron":
        mend = Mend(values={"transformer_impl": "transformer_engine"})
        return Hit(at="tp_comm_overlap", words={"lacks": "--transformer-impl transformer_engine"}, mend=mend)
    return None


@check("RL204", "communication", "error", "overlap_param_gather")
def gather_overlap_prerequisites(case: Case) -> Hit | None:
    """B063: --overlap-param-gather needs the distributed optimizer and --overlap-grad-reduce."""
    if not case.config.overlap.overlap_param_gather or case.fsdp:
        return None
    needed: dict[str, Any] = {}
    if not case.config.parallel.use_distributed_optimizer:
        needed["use_distributed_optimizer"] = True
    if not case.on("overlap_grad_reduce"):
        needed["overlap_grad_reduce"] = True
    if not needed:
        return None
    lacks = " ".join("--" + name.replace("_", "-") for name in needed)
    return Hit(at="overlap_param_gather", words={"lacks": lacks}, mend=Mend(values=needed))


@check("RL205", "communication", "hint", "tensor_model_parallel_size", needs="cost")
def tp_too_large(case: Case) -> Hit | None:
    """More tensor parallelism than memory needs."""
    if case.tp == 1:
        return None
    best = None
    for tp in (case.tp // 2, case.tp // 4, case.tp // 8):
        if tp < 1:
            break
        values: dict[str, Any] = {"tensor_model_parallel_size": tp}
        if tp == 1:
            values |= {"sequence_parallel": False, "tp_comm_overlap": False}
        mend = Mend(values=values)
        after = case.after(mend)
        # A margin of a tenth: the prediction of memory is that good, and more ranks of dp take the batch.
        if after is None or after.memory.total > 0.9 * (case.hardware.memory_bytes if case.hardware else 0):
            break
        if after.setup.global_batch_size != case.setup.global_batch_size:  # type: ignore[union-attr]
            break
        if case.saved(mend) > (best[0] if best else 3 * WORTH):
            best = (case.saved(mend), tp, mend)
    if best is None:
        return None
    words = {"tp": case.tp, "less": best[1]}
    return Hit(at="tensor_model_parallel_size", words=words, mend=best[2])


@check("RL206", "communication", "warning", "num_layers_per_virtual_pipeline_stage", needs="cost")
def interleaving(case: Case) -> Hit | None:
    """A pipeline without virtual stages."""
    setup = case.setup
    assert setup is not None
    if case.pp < 2 or setup.vpp > 1 or setup.num_microbatches % case.pp:
        return None
    layers = case.config.model.num_layers
    if layers % case.pp:
        return None
    stage, best = layers // case.pp, None
    for vpp in range(2, min(stage, 12) + 1):
        if stage % vpp:
            continue
        mend = Mend(values={"num_layers_per_virtual_pipeline_stage": stage // vpp})
        saved = case.saved(mend)
        if saved > (best[0] + WORTH if best else WORTH) and case.fits(case.after(mend)):
            best = (saved, vpp, mend)
    if best is None:
        return None
    words = {"pp": case.pp, "vpp": best[1]}
    return Hit(at="pipeline_model_parallel_size", words=words, mend=best[2])


@check("RL207", "communication", "error", "num_layers_per_virtual_pipeline_stage", "num_layers")
def virtual_stages_divide(case: Case) -> Hit | None:
    """Virtual stages that do not divide the layers, or microbatches that do not divide over the stages."""
    p, layers = case.config.parallel, case.config.model.num_layers
    each, number = p.num_layers_per_virtual_pipeline_stage, p.num_virtual_stages_per_pipeline_rank
    if not each and not number:
        return None
    at = "num_layers_per_virtual_pipeline_stage" if each else "num_virtual_stages_per_pipeline_rank"
    uneven = p.account_for_embedding_in_pipeline_split or p.pipeline_model_parallel_layout
    parts = case.pp * (each or number or 1)
    if not uneven and layers % parts:
        return Hit(at=at, words={"layers": layers, "parts": parts})
    if case.pp == 1:
        return Hit(at=at, text="pp1", mend=Mend(values={at: None}))
    if case.microbatches and case.microbatches % case.pp:
        return Hit(at=at, text="batch", words={"number": case.microbatches, "pp": case.pp})
    return None


@check("RL208", "communication", "warning", "context_parallel_size", needs="cost")
def cp_without_need(case: Case) -> Hit | None:
    """Context parallelism for sequences that fit without it."""
    if case.cp == 1:
        return None
    mend = Mend(values={"context_parallel_size": 1})
    after = case.after(mend)
    if after is None or after.setup.global_batch_size != case.setup.global_batch_size:  # type: ignore[union-attr]
        return None
    if not case.fits(after) or case.saved(mend) < WORTH:
        return None
    words = {"cp": case.cp, "length": case.config.train.seq_length}
    return Hit(at="context_parallel_size", words=words, mend=mend)


@check("RL209", "communication", "warning", "ddp_bucket_size", "ddp_num_buckets")
def bucket_size(case: Case) -> Hit | None:
    """Buckets so small that latency rules, or so large that nothing hides."""
    size = case.config.overlap.ddp_bucket_size
    if size is None or (case.dp or 1) == 1:
        return None
    least = max(10_000_000, 250_000 * (case.dp or 1))
    if least <= size <= 1_000_000_000:
        return None
    good = max(40_000_000, 1_000_000 * (case.dp or 1) * case.cp)
    mend = Mend(values={"ddp_bucket_size": good})
    return Hit(at="ddp_bucket_size", words={"size": size, "good": good}, mend=mend)


@check("RL210", "communication", "hint", "tp_comm_overlap", needs="cost")
def tp_overlap(case: Case) -> Hit | None:
    """Tensor-parallel collectives in the open."""
    p = case.config.parallel
    if (
        case.tp == 1
        or not p.sequence_parallel
        or case.config.overlap.tp_comm_overlap
        or case.tp > case.gpus_per_node
    ):
        return None
    if case.get("transformer_impl") == "local" or case.get("deterministic_mode"):
        return None
    mend = Mend(values={"tp_comm_overlap": True})
    if case.saved(mend) < 2 * WORTH:
        return None
    return Hit(at="sequence_parallel", words={"tp": case.tp}, mend=mend)


@check("RL211", "communication", "hint", "grad_reduce_in_bf16", needs="cost")
def gradient_bytes(case: Case) -> Hit | None:
    """Gradients cross the network in fp32 and are seen."""
    if case.config.precision.grad_reduce_in_bf16 or not case.config.precision.bf16:
        return None
    values = {"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": None}
    mend = Mend(values=values, safe=False)
    if case.saved(mend) < 2 * WORTH:
        return None
    return Hit(at="bf16", words={"dp": case.dp}, mend=mend)


@check("RL212", "communication", "warning", "expert_model_parallel_size", "num_experts")
def expert_parallel(case: Case) -> Hit | None:
    """Every rank holds all experts."""
    experts, ep = case.config.moe.num_experts, case.config.parallel.expert_model_parallel_size
    if not experts or ep > 1 or case.world_size is None or case.world_size < 2:
        return None
    room = (case.dp or 1) * case.tp * case.cp
    best = max(
        n for n in range(1, min(experts, room, case.gpus_per_node) + 1) if experts % n == 0 == room % n
    )
    if best == 1:
        return None
    values: dict[str, Any] = {"expert_model_parallel_size": best, "moe_token_dispatcher_type": "alltoall"}
    if case.tp > 1:
        values["expert_tensor_parallel_size"] = 1
    return Hit(at="num_experts", words={"experts": experts, "ep": best}, mend=Mend(values=values))


@check("RL213", "communication", "warning", "moe_token_dispatcher_type")
def dispatcher(case: Case) -> Hit | None:
    """All tokens gathered on all expert ranks."""
    moe, ep = case.config.moe, case.config.parallel.expert_model_parallel_size
    if not moe.num_experts or ep == 1 or case.get("moe_token_dispatcher_type") != "allgather":
        return None
    if moe.moe_router_topk >= ep:
        return None
    words = {"ep": ep, "topk": moe.moe_router_topk}
    mend = Mend(values={"moe_token_dispatcher_type": "alltoall"})
    at = (
        "moe_token_dispatcher_type"
        if case.said("moe_token_dispatcher_type")
        else "expert_model_parallel_size"
    )
    return Hit(at=at, words=words, mend=mend)


@check("RL214", "communication", "warning", "expert_tensor_parallel_size")
def expert_tp(case: Case) -> Hit | None:
    """Small experts cut by tensor parallelism."""
    moe, p = case.config.moe, case.config.parallel
    if not moe.num_experts or case.tp == 1 or p.expert_tensor_parallel_size is not None:
        return None
    wide = moe.moe_ffn_hidden_size or 0
    if wide == 0 or wide // case.tp >= 2048:
        return None
    words = {"tp": case.tp, "each": wide // case.tp}
    mend = Mend(values={"expert_tensor_parallel_size": 1})
    return Hit(at="tensor_model_parallel_size", words=words, mend=mend)


@check("RL215", "communication", "warning", "overlap_p2p_communication")
def send_overlap(case: Case) -> Hit | None:
    """Sends between virtual stages in the open."""
    if virtual_stages(case.config) == 1 or not case.said("overlap_p2p_communication"):
        return None
    if case.get("overlap_p2p_communication") is not False:
        return None
    value = True if case.dialect == "megatron" else None
    return Hit(at="overlap_p2p_communication", mend=Mend(values={"overlap_p2p_communication": value}))


@check("RL216", "communication", "error", "global_batch_size", "micro_batch_size")
def batch_divides(case: Case) -> Hit | None:
    """A global batch that the ranks cannot share."""
    train = case.config.train
    if train.global_batch_size is None or case.dp is None or train.decrease_batch_size_if_needed:
        return None
    unit = train.micro_batch_size * case.dp
    if train.global_batch_size % unit == 0:
        return None
    near = max(1, round(train.global_batch_size / unit)) * unit
    words = {"size": train.global_batch_size, "unit": unit, "dp": case.dp, "near": near}
    mend = Mend(values={"global_batch_size": near}, safe=False)
    return Hit(at="global_batch_size", words=words, mend=mend)


@check("RL217", "communication", "error", "tensor_model_parallel_size", "pipeline_model_parallel_size")
def ranks_arranged(case: Case) -> Hit | None:
    """A number of devices that tp x pp x cp does not divide."""
    model = case.tp * case.pp * case.cp
    if case.world_size is None or case.world_size % model == 0:
        return None
    return Hit(at="tensor_model_parallel_size", words={"model": model, "gpus": case.world_size})


@check("RL218", "communication", "hint", "pipeline_model_parallel_layout", needs="cost")
def stage_balance(case: Case) -> Hit | None:
    """The last stage also holds head and loss, and the others wait for it."""
    cost = case.cost
    assert cost is not None
    share = cost.parts.get("imbalance", 0.0) / cost.step_s
    if case.pp == 1 or share < 0.06:
        return None
    layers = case.config.model.num_layers
    mend = Mend()
    if (layers + 2) % (case.pp * virtual_stages(case.config)) == 0:
        both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
        mend = Mend(values=both) if case.saved(Mend(values=both)) > WORTH / 2 else Mend()
    return Hit(at="pipeline_model_parallel_size", words={"share": f"{share:.0%}", "pp": case.pp}, mend=mend)


@check("RL219", "communication", "hint", "moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm")
def expert_overlap(case: Case) -> Iterator[Hit]:
    """Tokens travel to their experts in the open."""
    moe = case.config.moe
    if not moe.num_experts or case.config.parallel.expert_model_parallel_size == 1:
        return
    if moe.moe_shared_expert_intermediate_size and not moe.moe_shared_expert_overlap:
        values = {"moe_shared_expert_overlap": True}
        yield Hit(at="moe_shared_expert_intermediate_size", mend=Mend(values=values))
    elif not moe.overlap_moe_expert_parallel_comm and case.get("moe_token_dispatcher_type") != "allgather":
        yield Hit(
            at="expert_model_parallel_size", mend=Mend(values={"overlap_moe_expert_parallel_comm": True})
        )
