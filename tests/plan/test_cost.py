"""The cost model: against measured steps, against published runs, and in its own logic."""

import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_runs import published

from redline.config import PRESETS, RunConfig, with_values
from redline.errors import ConfigError
from redline.formulas.time import Rates, collective_s
from redline.hardware import SHEETS, detect_cpu, hardware_named
from redline.plan.cost import ACCOUNTS, UNCERTAINTY, UNCERTAINTY_WIDE, StepCost, predict
from redline.plan.cost_memory import rank_parameters
from redline.plan.cost_rates import rates_of
from redline.plan.cost_setup import Setup, effective, setup_of
from redline.units import GIB

TE = {"transformer_impl": "transformer_engine", "cross_entropy_loss_fusion": True}
FP8 = {**TE, "fp8_format": "hybrid"}
# One H200, tokens/s: megatron-core with Transformer Engine, one microbatch a step (name, preset, changes,
# micro-batch, length, measured, peak GiB), and the plain path with four microbatches.
MEASURED: tuple[tuple[str, dict[str, Any], int, int, float, float | None], ...] = (
    ("llama3-8b", {**TE, "num_layers": 8}, 2, 8192, 35_400, 72),
    ("llama3-8b", {**TE, "num_layers": 8}, 4, 8192, 37_200, 97),
    ("llama3.2-1b", TE, 2, 8192, 54_800, 47),
    ("llama3.2-1b", TE, 4, 4096, 62_600, 47),
    ("gpt-1.3b", {**TE, "max_position_embeddings": 4096}, 4, 4096, 55_800, 50),
    ("llama3-8b", {**FP8, "num_layers": 8}, 2, 8192, 46_500, None),
    ("llama3-8b", {**FP8, "num_layers": 8}, 4, 8192, 49_600, None),
    ("llama3.2-1b", FP8, 2, 8192, 65_100, None),
    ("llama3.2-1b", FP8, 4, 4096, 74_900, None),
    ("gpt-1.3b", {**FP8, "max_position_embeddings": 4096}, 4, 4096, 70_800, None),
)
PLAIN: tuple[tuple[str, dict[str, Any], int, int, float, float], ...] = (
    ("llama3.2-1b", {"global_batch_size": 4}, 1, 8192, 45_074, 45.5),
    ("llama3-8b", {"global_batch_size": 4, "num_layers": 8}, 1, 8192, 32_594, 70.7),
    ("gpt-1.3b", {}, 8, 2048, 48_035, 58.6),
)


def costed(
    preset: str, *, world: int = 1, gpu: str = "h200", dialect: Any = "megatron", **values: Any
) -> StepCost:
    return predict(setup(preset, world=world, dialect=dialect, **values), rates_of(hardware_named(gpu)))  # type: ignore[arg-type]


def setup(preset: str, *, world: int = 1, dialect: Any = "megatron", **values: Any) -> Setup:
    stated = {**PRESETS[preset], "bf16": True, "train_iters": 1, **values}
    return setup_of(with_values(RunConfig(), stated), world, dialect=dialect)


def test_the_measured_links_of_two_h200s_explain_what_tensor_parallelism_costs_there() -> None:
    """There each GPU reached 87.8% of one GPU's tokens/s (benchmarks/results/two-gpus-h200.json)."""
    shape = {"num_layers": 8, "seq_length": 8192, "micro_batch_size": 1, "global_batch_size": 2, "bf16": True}
    tp = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    measured = rates_of(hardware_named("h200"))  # type: ignore[arg-type]

    def share(rates: Rates) -> float:
        one = predict(setup("llama3-8b", dialect="redline", **shape), rates)
        two = predict(setup("llama3-8b", world=2, dialect="redline", **shape, **tp), rates)
        return two.tokens_per_s / one.tokens_per_s

    sheet = replace(measured, collectives={})
    assert abs(share(measured) - 0.878) < abs(share(sheet) - 0.878)
    assert share(measured) == pytest.approx(0.878, abs=0.05)


@pytest.mark.parametrize(("preset", "change", "micro", "length", "rate", "peak"), MEASURED)
def test_megatron_on_one_h200(
    preset: str, change: dict[str, Any], micro: int, length: int, rate: float, peak: float | None
) -> None:
    batch = {"micro_batch_size": micro, "global_batch_size": micro, "seq_length": length}
    found = costed(preset, **{**batch, **change})
    assert found.tokens_per_s == pytest.approx(rate, rel=0.08)
    if peak is not None:
        assert found.memory.total / GIB == pytest.approx(peak, rel=0.06)


@pytest.mark.parametrize(("preset", "change", "micro", "length", "rate", "peak"), PLAIN)
def test_plain_path_on_one_h200(
    preset: str, change: dict[str, Any], micro: int, length: int, rate: float, peak: float
) -> None:
    batch = {"micro_batch_size": micro, "global_batch_size": micro, "seq_length": length}
    found = costed(preset, dialect="redline", transformer_impl="local", **{**batch, **change})
    assert found.tokens_per_s == pytest.approx(rate, rel=0.08)
    assert found.memory.total / GIB == pytest.approx(peak, rel=0.06)


def test_published_runs() -> None:
    """Median absolute error of throughput over dense Megatron runs, and the band that is printed."""
    rows = published()
    errors = [row.error for row in rows]
    sizes = sorted(abs(error) for error in errors)
    assert len(rows) >= 100
    assert statistics.median(sizes) <= 0.07
    assert abs(statistics.median(errors)) <= 0.04
    assert sizes[len(sizes) // 2] <= UNCERTAINTY and sizes[len(sizes) * 4 // 5] <= UNCERTAINTY_WIDE
    memory = [
        row.predicted.memory.total / GIB / row.peak_memory_gib - 1 for row in rows if row.peak_memory_gib
    ]
    assert len(memory) >= 15 and statistics.median(map(abs, memory)) <= 0.10


def test_accounts_hold_every_second() -> None:
    for gpu in ("h100", "a100", "b200"):
        found = costed("llama3-70b", world=64, gpu=gpu, tensor_model_parallel_size=8, global_batch_size=64,
                       pipeline_model_parallel_size=4, recompute_granularity="full",
                       recompute_method="uniform", recompute_num_layers=1)  # fmt: skip
        known = {cause for causes in ACCOUNTS.values() for cause in causes}
        assert set(found.parts) <= known
        assert sum(found.accounts.values()) == pytest.approx(found.step_s)
        assert all(seconds >= 0 for seconds in found.parts.values())
        assert found.accounts["memory"] > 0 and found.parts["bubble"] > 0
        assert 0 < found.mfu["causal-half"] < found.mfu["full"] < 1


BASE: dict[str, Any] = {
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 128,
}


@pytest.mark.parametrize(
    "better",
    (
        {"sequence_parallel": True},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"overlap_grad_reduce": True},
        {"num_layers_per_virtual_pipeline_stage": 5},
        {"cross_entropy_loss_fusion": True},
        {"global_batch_size": 512},
        {"sequence_parallel": True, "tp_comm_overlap": True},
        {"fp8_format": "hybrid"},
        {"grad_reduce_in_bf16": True},
    ),
    ids=lambda better: next(reversed(better)),
)
def test_switches_help(better: dict[str, Any]) -> None:
    slow, fast = (costed("llama3-70b", world=64, gpu="h100", **{**BASE, **more}) for more in ({}, better))
    assert fast.tokens_per_s > slow.tokens_per_s


@pytest.mark.parametrize(
    "worse",
    (
        {"transformer_impl": "local"},
        {"attention_backend": "unfused"},
        {"gradient_accumulation_fusion": False},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
        {"tensor_model_parallel_size": 16, "pipeline_model_parallel_size": 1},
        {"num_layers": 160},
    ),
    ids=lambda worse: next(iter(worse)),
)
def test_switches_cost(worse: dict[str, Any]) -> None:
    fast, slow = (costed("llama3-70b", world=64, gpu="h100", **{**BASE, **more}) for more in ({}, worse))
    assert slow.tokens_per_s < fast.tokens_per_s


@pytest.mark.parametrize("sequence_parallel", (False, True))
@pytest.mark.parametrize("slower", (1, 20, 400))
def test_an_order_of_launch_never_costs(sequence_parallel: bool, slower: int) -> None:
    """However slow the links: unordered, half of what GEMMs cover is hidden, never half of everything."""
    found = setup("llama3-70b", world=64, **BASE, sequence_parallel=sequence_parallel)
    rates = rates_of(hardware_named("h100"))  # type: ignore[arg-type]
    rates = replace(rates, node=replace(rates.node, bytes_per_s=rates.node.bytes_per_s / slower))
    assert predict(found, rates).step_s < predict(replace(found, ordered=False), rates).step_s


def test_unordered_launches_cost_only_tensor_parallel_time() -> None:
    ordered = setup("llama3-70b", world=64, **BASE, sequence_parallel=True)
    rates = rates_of(hardware_named("h100"))  # type: ignore[arg-type]
    one, other = predict(ordered, rates), predict(replace(ordered, ordered=False), rates)
    assert other.parts["tp"] > one.parts["tp"] and other.parts["attention"] == one.parts["attention"]


def test_weights_transposed_in_each_backward_cost_a_pass_over_their_bytes() -> None:
    """Read and written at a byte each: a hundredth of a microbatch of few tokens, less of one of many."""
    rates = rates_of(hardware_named("h200"))  # type: ignore[arg-type]
    base = {"num_layers": 8, "seq_length": 8192, "fp8_format": "hybrid", "global_batch_size": 4}
    shares = []
    for samples in (1, 4):
        made, kept = (
            predict(setup("llama3-8b", dialect="redline", micro_batch_size=samples, **base, **more), rates)
            for more in ({}, {"keep_fp8_transpose_cache": True})
        )
        weights = 8 * 4096 * (4096 + 4096 + 2 * 1024 + 3 * 14336)
        wanted = 4 // samples * 2 * weights / rates.bytes_per_s
        assert made.step_s - kept.step_s == pytest.approx(wanted, rel=1e-6)
        shares.append(wanted / made.step_s)
        uncached = {**base, "parameter_transpose_cache": False}
        each = predict(setup("llama3-8b", dialect="redline", micro_batch_size=samples, **uncached), rates)
        assert each.step_s - kept.step_s == pytest.approx(3 * wanted, rel=1e-6)  # 3 bytes in each direction
    assert 0.01 > shares[0] > 3 * shares[1]


def test_in_fp8_no_more_is_promised_of_joined_gemms_than_pieces_hide() -> None:
    """Rows of half the bytes, and a fifth less in the open by pieces; nobody else writes fp8 to its peers."""
    sp = {"tensor_model_parallel_size": 8, "sequence_parallel": True, "seq_length": 8192}
    on, rates = {"tp_comm_overlap": True}, rates_of(hardware_named("h200"))  # type: ignore[arg-type]

    def visible(dialect: str = "redline", **values: Any) -> float:
        return predict(setup("llama3-8b", world=8, dialect=dialect, **sp, **values), rates).parts["tp"]

    fp8 = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
    apart, auto, pieces = (
        visible(**fp8, **each) for each in ({}, on, {**on, "tp_comm_overlap_method": "chunked"})
    )
    assert visible(**on) < 0.5 * visible(), "16 bits are pushed"
    assert apart > auto > 0.75 * apart and auto > pieces > 0.75 * auto
    assert auto == visible(**fp8, **on, tp_comm_overlap_method="plain")
    measured = {**fp8, "fp8_recipe": "tensorwise"}
    assert visible(**measured, **on) > auto and visible(**measured) == apart
    assert visible("megatron", **fp8, **on) < 0.5 * visible("megatron", **fp8), "its library has more ways"


def test_instances_shard_inside_a_node_and_hide_what_goes_across() -> None:
    """Two nodes, a copy of the states on each: gathers stay inside, a shard's sum goes across."""
    dp = {"use_distributed_optimizer": True, "global_batch_size": 16, "overlap_grad_reduce": True}
    one = costed("llama3-8b", world=16, gpu="h100", **dp)
    two = costed("llama3-8b", world=16, gpu="h100", **dp, num_distributed_optimizer_instances=2)
    late = costed(
        "llama3-8b", world=16, gpu="h100", **{**dp, "overlap_grad_reduce": False},
        num_distributed_optimizer_instances=2,
    )  # fmt: skip
    assert two.memory.optimizer == pytest.approx(2 * one.memory.optimizer)
    assert 0 < two.parts["dp"] < late.parts["dp"]
    rates = rates_of(hardware_named("h100"))  # type: ignore[arg-type]
    grads = 4 * rank_parameters(late.setup).dense
    inside = collective_s(rates, "reduce_scatter", grads, 8) + collective_s(rates, "all_gather", grads / 2, 8)
    assert late.parts["dp"] == pytest.approx(inside + collective_s(rates, "all_reduce", grads / 8, 2, 8))


def test_full_recompute_repeats_the_forward_pass() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, again = costed("llama3-8b"), costed("llama3-8b", **full)
    repeated = again.parts["recompute"] / (again.step_s - again.parts["optimizer"] - again.parts["recompute"])
    assert 0.2 < repeated < 0.35  # a forward pass is about a third of a step without the head
    assert again.memory.activations < plain.memory.activations / 5


def test_what_is_dropped_is_not_counted() -> None:
    """Each module keeps less, and takes time; spread inputs are a share. TE's norms are in its linears."""
    tp = {"tensor_model_parallel_size": 2, "world": 2, "transformer_impl": "fused"}
    plain = costed("llama3-8b", dialect="redline", **tp)

    def selective(*modules: str, **more: Any) -> StepCost:
        flags = {"recompute_granularity": "selective", "recompute_modules": modules}
        return costed("llama3-8b", dialect="redline", **{**tp, **flags, **more})

    for modules in (("layernorm",), ("activation",), ("mlp",), ("layernorm", "mlp")):
        less = selective(*modules)
        assert less.memory.activations < plain.memory.activations and less.step_s > plain.step_s
    both = selective("layernorm", "mlp").memory.activations
    assert both < selective("mlp").memory.activations < selective("activation").memory.activations
    te = {"transformer_impl": "transformer_engine"}
    kept = selective(**te).memory.activations
    assert selective("layernorm", **te).memory.activations == kept
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    whole, spread = (
        costed("llama3-8b", **tp, **full, distribute_saved_activations=on) for on in (False, True)
    )
    assert spread.memory.activations < whole.memory.activations and spread.step_s > whole.step_s


def test_moe_and_mtp_are_costed() -> None:
    moe = {
        "num_experts": 8,
        "moe_ffn_hidden_size": 4096,
        "expert_model_parallel_size": 8,
        "global_batch_size": 64,
    }
    sparse = costed("llama3-8b", world=8, moe_token_dispatcher_type="alltoall", moe_grouped_gemm=True, **moe)
    assert sparse.parts["ep"] > 0
    assert costed("llama3-8b", mtp_num_layers=1).step_s > costed("llama3-8b").step_s


def test_megatron_defaults_stand_where_nothing_is_stated() -> None:
    config = RunConfig()
    assert effective(config, "transformer_impl", "megatron", frozenset()) == "transformer_engine"
    assert effective(config, "transformer_impl", "redline", frozenset()) == "auto"
    assert effective(config, "fp8_amax_history_len", "megatron", frozenset()) == 1
    assert effective(config, "fp8_amax_history_len", "megatron", frozenset({"fp8_amax_history_len"})) == 1024


def test_device_without_data_sheet_is_refused() -> None:
    with pytest.raises(ConfigError, match="no data sheet"):
        rates_of(detect_cpu())


@given(
    tp=st.sampled_from((1, 2, 4, 8)),
    pp=st.sampled_from((1, 2, 4, 8)),
    cp=st.sampled_from((1, 2)),
    dp=st.sampled_from((1, 2, 16)),
    micro=st.sampled_from((1, 2, 3)),
    number=st.integers(1, 40),
    recompute=st.sampled_from((None, "selective", "full")),
    impl=st.sampled_from(("local", "transformer_engine")),
    gpu=st.sampled_from([sheet.name for sheet in SHEETS if hardware_named(sheet.name) is not None]),
    fp8=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_layout(
    tp: int,
    pp: int,
    cp: int,
    dp: int,
    micro: int,
    number: int,
    recompute: Any,
    impl: str,
    gpu: str,
    fp8: bool,
) -> None:
    """Times are positive and finite, add up, and never beat the peak."""
    full = {"recompute_method": "block", "recompute_num_layers": 2} if recompute == "full" else {}
    found = costed(
        "llama3-8b", world=tp * pp * cp * dp, gpu=gpu, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, context_parallel_size=cp, micro_batch_size=micro,
        global_batch_size=micro * dp * number,
        recompute_granularity=recompute, transformer_impl=impl, sequence_parallel=tp > 1,
        fp8_format="hybrid" if fp8 else None, **full,
    )  # fmt: skip
    assert 0 < found.step_s < 1e6
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert min(found.parts.values()) >= -1e-9 * found.step_s
    assert 0 < found.mfu_of_format < 1
    assert found.memory.total > 0
