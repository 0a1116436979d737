"""fp8 on several ranks: tensor-parallel ones train as one process does, and all cast by the same scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.comm import close_world
from redline.config import Environment
from redline.formulas.activations import MicrobatchShape, saved_by_layer
from redline.formulas.shape import ModelShape
from redline.precision import Fp8State
from redline.run import open_run

from .ranks import on_ranks
from .tiny import Values, parsed, take_steps

SMALL = {"hidden_size": 32, "ffn_hidden_size": 64, "train_iters": 4, "make_vocab_size_divisible_by": 2}
LLAMA = {
    **SMALL, "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "swiglu",
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
FP8 = {"fp8_format": "hybrid"}


def of_all_ranks(state: Fp8State) -> torch.Tensor:
    """Scales that ranks share. Measured ones of weights are the next step's already, each rank's its own."""
    return state.scale[:, ::2] if state.spec.recipe == "tensorwise" else state.scale


def seen_on(world_size: int, variants: dict[str, Values]) -> dict[str, list[dict[str, Any]]]:
    """Losses, norms and scales of every variant on every rank, all in one fork."""

    def work(environment: Environment) -> dict[str, dict[str, Any]]:
        found = {}
        for number, (name, values) in enumerate(variants.items()):
            run = open_run(parsed(values), replace(environment, attempt=number), lambda _: None)
            steps = take_steps(run)
            fp8 = run.state.fp8
            found[name] = {
                "losses": [step.loss for step in steps],
                "norms": [step.result.grad_norm for step in steps],
                "scales": None if fp8 is None else of_all_ranks(fp8.state),
                "sites": [] if fp8 is None else sorted(fp8.gemms),
            }
            close_world()
        return found

    ranks = on_ranks(world_size, work)
    return {name: [rank[name] for rank in ranks] for name in variants}


def test_tensor_parallel_ranks() -> None:
    """Near one process in fp8, as near as that is to bf16; on both ranks the same losses and scales (B039).

    A rank casts its own features of a row GEMM's input by a scale that both share, except in the first step.
    """
    tp, sp = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    again = {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "activation", "core_attn"),
    }
    models = {"gpt": SMALL, "llama": LLAMA}
    recipes = {"delayed": FP8, "tensorwise": {**FP8, "fp8_recipe": "tensorwise"}}
    one = {name: {**model, **FP8} for name, model in models.items()}
    bf16 = {f"{name} bf16": {**model, "bf16": True} for name, model in models.items()}
    alone = seen_on(1, one | bf16)
    layouts = {"tp": tp, "sp": sp, "sp again": {**sp, **again}}
    both = seen_on(
        2,
        {
            f"{name} {recipe} {layout}": {**models[name], **recipes[recipe], **layouts[layout]}
            for name, recipe in (("gpt", "delayed"), ("llama", "delayed"), ("llama", "tensorwise"))
            for layout in layouts
            if recipe == "delayed" or layout == "sp"
        },
    )
    for name, (first, second) in both.items():
        model = name.split()[0]
        wanted = alone[model][0]
        assert first["losses"] == second["losses"] and first["norms"] == second["norms"], name
        assert torch.equal(first["scales"], second["scales"]), name
        assert first["sites"] == wanted["sites"] and len(wanted["sites"]) == 8
        assert first["losses"] == pytest.approx(wanted["losses"], rel=5e-3), name
        assert first["norms"] == pytest.approx(wanted["norms"], rel=0.1), name
        assert first["losses"] != alone[f"{model} bf16"][0]["losses"], name
    for name in ("gpt", "llama"):
        assert both[f"{name} delayed sp"][0]["losses"] == both[f"{name} delayed sp again"][0]["losses"]


OVERLAP = {"tp_comm_overlap": True}
PLAIN = {**OVERLAP, "tp_comm_overlap_method": "plain"}
PIECES = {**OVERLAP, "tp_comm_overlap_method": "chunked", "tp_comm_overlap_chunks": 3}
APART = {"tp_comm_bulk_wgrad": False, "tp_comm_bulk_dgrad": False}
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "activation", "core_attn")}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 1, "train_iters": 2}
TRAVELLING = {
    "gpt": (
        {**SMALL, **FP8, **SP, "hidden_dropout": 0.1, "fp8_param_gather": False},
        {
            "plain, cast in each pass": {**PLAIN, **APART, "parameter_transpose_cache": False},
            "pieces": PIECES,
        },
    ),
    "llama": (
        {**LLAMA, **FP8, **SP, "fp8_recipe": "tensorwise"},
        {
            "plain again": {**PLAIN, **AGAIN},
            "plain full": {**PLAIN, **FULL},
            "auto, scattered": {**OVERLAP, "tp_comm_overlap_rs_dgrad": True},
        },
    ),
    "mixed": ({**LLAMA, **FP8, **SP, "fp8_keep_bf16": ("*.0.*qkv", "*.1.*fc2")}, {"plain": PLAIN}),
}


def test_rows_that_travel_in_fp8() -> None:
    """Cast, then sent: the bits of sent, then cast; in pieces, whose GEMMs may round elsewhere, near them.

    Each rank's rows hold another largest value, so scales that ranks measured apart would show.
    """
    variants = {f"{base}: {name}": {**values, **layout}
                for base, (values, layouts) in TRAVELLING.items()
                for name, layout in {"apart": {}, **layouts}.items()}  # fmt: skip
    found = seen_on(2, variants)
    for name, (first, second) in found.items():
        wanted = found[f"{name.split(':')[0]}: apart"][0]
        assert first["losses"] == second["losses"] and first["norms"] == second["norms"], name
        assert torch.equal(first["scales"], second["scales"]), name
        exact = "plain" in name
        assert first["losses"] == pytest.approx(wanted["losses"], rel=0 if exact else 1e-3), name
        assert first["norms"] == pytest.approx(wanted["norms"], rel=0 if exact else 1e-2), name
        assert not exact or torch.equal(first["scales"], wanted["scales"]), name


@pytest.mark.long
def test_rows_that_travel_in_fp8_on_four_ranks() -> None:
    """tp 4, and tp 2 beside dp 2 with weights in fp8 alone: sums of four have an order of their own."""
    four = {"tensor_model_parallel_size": 4}
    gather = {"use_distributed_optimizer": True, "fp8_param_gather": True}
    for base, (values, _) in TRAVELLING.items():
        found = seen_on(
            4, {f"{name}{how}": {**values, **layout, **overlap}
                for name, layout in (("tp 4", four), ("dp 2", gather))
                for how, overlap in (("", {}), (" plain", PLAIN), (" pieces", OVERLAP))
                if not (base == "mixed" and layout is gather)}
        )  # fmt: skip
        for name, ranks in found.items():
            wanted = found[" ".join(name.split()[:2])][0]
            assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks), (base, name)
            assert ranks[0]["losses"] == pytest.approx(wanted["losses"], rel=1e-3), (base, name)


def test_a_head_in_fp8_on_tensor_parallel_ranks() -> None:
    """Each rank multiplies with its rows of the vocabulary: near one process, tied and untied."""
    head = {**FP8, "fp8_output_proj": True, "make_vocab_size_divisible_by": 16, "train_iters": 2}
    models = {"gpt": {**SMALL, **head}, "llama": {**LLAMA, **head}}
    layouts = {"gpt": {}, "llama": {"sequence_parallel": True}}
    alone = seen_on(1, models | {"in bf16": {**models["gpt"], "fp8_output_proj": False}})
    tp = {"tensor_model_parallel_size": 2}
    for name, (first, second) in seen_on(
        2, {name: {**model, **tp, **layouts[name]} for name, model in models.items()}
    ).items():
        assert first["losses"] == second["losses"] and first["norms"] == second["norms"], name
        assert first["losses"] == pytest.approx(alone[name][0]["losses"], rel=5e-3), name
        assert first["norms"] == pytest.approx(alone[name][0]["norms"], rel=0.1), name
    assert alone["gpt"][0]["losses"] != alone["in bf16"][0]["losses"]


def test_data_parallel_ranks_share_scales(tmp_path: Path) -> None:
    """B039: ranks see other samples, and cast by the same scales from the end of the first step on."""
    scale = {**FP8, "fp8_interval": 100}
    sharded = {"use_distributed_optimizer": True}
    variants = {"renewed": FP8, "kept": scale, "measured": {**FP8, "fp8_recipe": "tensorwise"}}
    found = seen_on(2, {name: {**LLAMA, **each, **sharded} for name, each in variants.items()})
    for name, (first, second) in found.items():
        assert torch.equal(first["scales"], second["scales"]), name
        assert first["losses"] == second["losses"], name
    assert not torch.equal(found["renewed"][0]["scales"], found["kept"][0]["scales"])


def test_the_whole_sequence_is_kept_in_fp8() -> None:
    """Beside sequence parallelism: the inputs of qkv and fc1, a byte a value, of all tokens; own rows, where
    these travel in fp8."""
    shape = ModelShape(
        num_layers=1, hidden=64, ffn=128, num_heads=4, num_groups=4, head_dim=16, vocab_size=64,
        padded_vocab_size=64, max_positions=32,
    )  # fmt: skip
    run = MicrobatchShape(seq_length=32, micro_batch_size=1, dtype="bf16", fp8=True, tp=2, sequence=True)
    kept = {(held.site, held.what): held.num_bytes for held in saved_by_layer(shape.of_rank(2), run)}
    assert kept["attention.qkv", "input"] == kept["mlp.fc1", "input"] == 32 * 64
    kept = {(held.site, held.what): held.num_bytes
            for held in saved_by_layer(shape.of_rank(2), replace(run, fp8_linked=True))}  # fmt: skip
    assert kept["attention.qkv", "input"] == kept["mlp.fc1", "input"] == 16 * 64
