"""Published runs as configurations: the rows of published_runs.tsv, to hold the cost model against."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.config import RunConfig, with_values
from redline.formulas.flops import flops_per_token
from redline.hardware import hardware_named
from redline.plan.cost import StepCost, predict
from redline.plan.cost_rates import rates_of
from redline.plan.cost_setup import setup_of

TABLE = Path(__file__).with_name("published_runs.tsv")
GPUS = {"A100-80GB": "A100-SXM4-80GB", "A100-40GB": "A100-SXM4-40GB"}
RACKS = {"GB200": 72, "GB300": 72}
RECIPES = {"fp8-current": "tensorwise", "mxfp8": "mxfp8", "fp8-delayed": "delayed"}
# Runs of before flash attention and Transformer Engine: plain modules, no overlap, dropout (not BLOOM's).
OLD = ("mlm", "sel", "blm")
# NeMo's recipes reduce gradients in bf16, fuse the loss, and overlap tp; the tables do not repeat it.
NEMO = ("dgx", "nem", "mbs")


@dataclass(frozen=True)
class Published:
    """One run: what was measured and what is predicted."""

    id: str
    gpu: str
    precision: str
    measured: float  # tokens/s of one GPU
    predicted: StepCost
    peak_memory_gib: float | None

    @property
    def error(self) -> float:
        """Predicted over measured throughput, less one."""
        return self.predicted.tokens_per_s / self.measured - 1


def published() -> list[Published]:
    """Every row, predicted."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return [_predicted(row) for row in csv.DictReader(lines, delimiter="\t")]


def _predicted(row: dict[str, str]) -> Published:
    hardware = hardware_named(GPUS.get(row["gpu"], row["gpu"]))
    assert hardware is not None, row["gpu"]
    setup = setup_of(config_of(row), int(row["num_gpus"]), dialect="megatron")
    rates = rates_of(hardware, gpus_per_node=RACKS.get(row["gpu"], 8))
    memory = None if row["peak_mem_gib"] == "-" else float(row["peak_mem_gib"])
    cost = predict(setup, rates)
    return Published(row["id"], row["gpu"], row["precision"], _measured(row, setup), cost, memory)


def config_of(row: dict[str, str]) -> RunConfig:
    """The row as Megatron's options."""
    arch, family = row["arch"].split(";"), row["id"][:3]
    old = family in OLD and "A100" in row["gpu"]
    gelu = "swiglu" not in arch and "sqrelu" not in arch
    layers, pp, vpp, tp = (_whole(row[name]) for name in ("num_layers", "pp", "vpp", "tp"))
    grouped = row["kv_groups"] != row["heads"]
    dropout = 0.1 if old and family != "blm" else 0.0
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": int(row["hidden"]),
        "ffn_hidden_size": int(row["ffn"]),
        "num_attention_heads": int(row["heads"]),
        "kv_channels": int(row["head_dim"]),
        "group_query_attention": grouped,
        "num_query_groups": int(row["kv_groups"]) if grouped else None,
        "vocab_size": _whole(row["vocab"], 128256),
        "activation_func": "gelu-tanh" if gelu else "swiglu" if "swiglu" in arch else "squared-relu",
        "normalization": "LayerNorm" if gelu else "RMSNorm",
        "add_bias_linear": gelu,
        "position_embedding_type": "learned_absolute" if gelu else "rope",
        "untie_embeddings_and_output_weights": "tied" not in arch,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "seq_length": int(row["seq"]),
        "micro_batch_size": int(row["micro_batch"]),
        "global_batch_size": int(row["global_batch"]),
        "train_iters": 1,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": _whole(row["cp"]),
        "sequence_parallel": row["sp"] == "yes",
        "use_distributed_optimizer": row["zero_fsdp"].startswith("zero1"),
        "grad_reduce_in_bf16": "grad-reduce-bf16" in row["other"] or family in NEMO,
        "overlap_grad_reduce": not old,
        "overlap_param_gather": not old,
        "tp_comm_overlap": _overlaps_tp(row, tp),
        "transformer_impl": "local" if old else "transformer_engine",
        "cross_entropy_loss_fusion": "fused-ce" in row["other"] or family in NEMO,
        "bf16": not row["precision"].startswith("fp16"),
        "fp16": row["precision"].startswith("fp16"),
    }
    if row["precision"] in RECIPES or row["precision"].startswith("fp8"):
        values |= {"fp8_format": "hybrid", "fp8_recipe": RECIPES.get(row["precision"], "delayed")}
    if vpp > 1 and pp > 1:
        values["num_virtual_stages_per_pipeline_rank"] = vpp
    if pp > 1 and layers % (pp * vpp):
        values["account_for_embedding_in_pipeline_split"] = values["account_for_loss_in_pipeline_split"] = (
            True
        )
    if "cuda-graph" in row["compile_graph"]:
        values["cuda_graph_impl"] = "local"
    return with_values(RunConfig(), values | _recompute(row["recompute"]))


def _overlaps_tp(row: dict[str, str], tp: int) -> bool:
    said = "tp-comm-overlap" in row["other"] and "tp-comm-overlap=off" not in row["other"]
    return said or (row["id"][:3] in ("dgx", "nem") and tp > 1)


def _recompute(text: str) -> dict[str, Any]:
    if text.startswith("full"):
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    kind, _, names = text.partition(":")
    modules = tuple(name for name in names.split("+") if name in ("core_attn", "mlp", "layernorm"))
    if kind == "selective" and modules:
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _measured(row: dict[str, str], setup: Any) -> float:
    """Tokens a second and GPU: as printed, from the step time, or from TFLOP/s by the row's convention."""
    tokens, step = row["tokens_per_s_per_gpu"], row["step_time_s"]
    if tokens != "-":
        return float(tokens)
    length = int(row["seq"])
    if step != "-":
        return int(row["global_batch"]) * length / float(step) / int(row["num_gpus"])
    rate = float(row["tflops_per_gpu"]) * 1e12
    if "96Bslh" in row["convention"]:  # Narayanan et al. 2021, equation 3: with the recomputed forward
        layers, hidden, vocab = (int(row[name]) for name in ("num_layers", "hidden", "vocab"))
        return rate / (96 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden)))
    convention = "full" if row["convention"] == "full" else "causal-half"
    return rate / flops_per_token(setup.shape, length, convention).total  # type: ignore[arg-type]


def _whole(text: str, otherwise: int = 1) -> int:
    return int(text) if text not in ("-", "") else otherwise
