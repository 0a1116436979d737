"""What is known of a launch, as plain values; None where it cannot be known."""

from __future__ import annotations

from typing import Any

from redline.doctor.case import CDMC, Case
from redline.errors import RedlineError
from redline.formulas.resolve import ffn_size
from redline.plan.cost_setup import virtual_stages

# fact -> the option it is read from, where it is simply that
PLAIN = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "seq_length": "seq_length",
    "num_experts": "num_experts",
    "mtp_num_layers": "mtp_num_layers",
    "transformer_impl": "transformer_impl",
    "attention_backend": "attention_backend",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "sequence_parallel": "sequence_parallel",
}
# What a fact that is not a plain option depends on.
DEPENDS = {
    "vpp": ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    "global_batch_size": ("global_batch_size", "micro_batch_size"),
    "num_microbatches": ("global_batch_size", "micro_batch_size"),
    "num_query_groups": ("num_query_groups", "group_query_attention", "num_attention_heads"),
    "ffn_hidden_size": ("ffn_hidden_size", "hidden_size"),
    "precision": ("bf16", "fp16"),
    "fp8": ("fp8_format",),
    "overlap_grad_reduce": ("overlap_grad_reduce",),
    "overlap_param_gather": ("overlap_param_gather",),
    "recompute": ("recompute_granularity",),
}


def facts_of(case: Case) -> dict[str, Any]:
    """Every fact by name. `fp8` and `recompute` are "none" when off; vpp is 1 without interleaving."""
    if case.launch is None:
        return {}
    open_names = _open(case)
    facts: dict[str, Any] = {"world_size": None if "gpus" in case.assumed else case.world_size}
    for name, option in PLAIN.items():
        facts[name] = None if option in open_names or case.missing(option) else case.get(option)
    facts["num_experts"] = facts["num_experts"] or (0 if "num_experts" not in open_names else None)
    facts["dp"] = (
        None if "gpus" in case.assumed or None in (facts["tp"], facts["pp"], facts["cp"]) else case.dp
    )
    derived = {
        "vpp": virtual_stages(case.config),
        "global_batch_size": _global_batch(case, facts["dp"]),
        "num_microbatches": _microbatches(case, facts["dp"]),
        "num_query_groups": _groups(case),
        "ffn_hidden_size": _ffn(case),
        "precision": _precision(case),
        "fp8": case.get("fp8_format") or "none",
        "overlap_grad_reduce": case.on("overlap_grad_reduce"),
        "overlap_param_gather": case.on("overlap_param_gather"),
        "recompute": case.get("recompute_granularity") or "none",
    }
    for name, value in derived.items():
        unknown = any(option in open_names for option in DEPENDS[name])
        facts[name] = None if unknown else value
    if case.missing("hidden_size") and not case.said("ffn_hidden_size"):
        facts["ffn_hidden_size"] = None
    if case.missing("num_attention_heads") and not case.config.model.group_query_attention:
        facts["num_query_groups"] = None
    facts["cuda_device_max_connections"] = _number(case.env(CDMC))
    return {name: facts[name] for name in ORDER}


ORDER = (
    "world_size",
    "tp",
    "pp",
    "cp",
    "ep",
    "vpp",
    "dp",
    "micro_batch_size",
    "global_batch_size",
    "num_microbatches",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "seq_length",
    "num_experts",
    "mtp_num_layers",
    "precision",
    "fp8",
    "transformer_impl",
    "attention_backend",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "sequence_parallel",
    "recompute",
    "cuda_device_max_connections",
)


def _open(case: Case) -> set[str]:
    """Option fields that hang on an open assumption."""
    assert case.launch is not None
    return set(case.launch.open_fields)


def _global_batch(case: Case, dp: int | None) -> int | None:
    train = case.config.train
    if train.global_batch_size is not None:
        return train.global_batch_size
    if dp is None or case.missing("micro_batch_size"):
        return None
    return train.micro_batch_size * dp


def _microbatches(case: Case, dp: int | None) -> int | None:
    size = _global_batch(case, dp)
    if size is None or dp is None or case.missing("micro_batch_size"):
        return None
    unit = case.config.train.micro_batch_size * dp
    return size // unit if size % unit == 0 else None


def _groups(case: Case) -> int | None:
    model = case.config.model
    groups = (model.num_query_groups or 1) if model.group_query_attention else model.num_attention_heads
    return groups


def _ffn(case: Case) -> int | None:
    try:
        return ffn_size(case.config.model)
    except RedlineError:
        return None


def _precision(case: Case) -> str:
    precision = case.config.precision
    stated = next((name for name in ("bf16", "fp16", "fp32", "fp64") if getattr(precision, name)), None)
    return stated or ("fp32" if case.dialect == "megatron" else "bf16")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None
