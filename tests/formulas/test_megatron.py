"""Megatron's estimators against values computed with its own code."""

from dataclasses import replace

import pytest
from formula_shapes import LLAMA3_8B, MIXTRAL, gpt

from redline.formulas.flops import flops_per_step
from redline.formulas.megatron import (
    MegatronLayout,
    megatron_activation_bytes,
    megatron_flops_per_step,
    megatron_weight_and_optimizer_bytes,
)

GPT_24 = gpt(24, 1024, 16, vocab=50304)
LLAMA3_8B_MTP = replace(LLAMA3_8B, mtp_num_layers=1)
SHARDED = {"dp": 8, "distributed_optimizer": True}
TRUSTED = {"sequence_parallel": True, "selective_recompute": True}


@pytest.mark.parametrize(
    ("shape", "seq_length", "batch", "flops"),
    [
        (LLAMA3_8B, 8192, 128, 5.397062776101274e16),
        (LLAMA3_8B_MTP, 8192, 128, 5.907024000004915e16),
        (GPT_24, 1024, 64, 148_897_926_217_728),
    ],
)
def test_flops(shape, seq_length, batch, flops):
    assert megatron_flops_per_step(shape, seq_length, batch) == flops


def test_its_flops_are_ours_where_the_vocabulary_needs_no_padding():
    assert megatron_flops_per_step(LLAMA3_8B, 8192, 128) == flops_per_step(LLAMA3_8B, 8192, 128)
    norms = 6 * 3 * 4096 * 8192 * 128  # of a prediction head it counts the norms, we do not
    assert (
        megatron_flops_per_step(LLAMA3_8B_MTP, 8192, 128) == flops_per_step(LLAMA3_8B_MTP, 8192, 128) + norms
    )


@pytest.mark.parametrize(
    ("shape", "layout", "num_bytes"),
    [
        (LLAMA3_8B, SHARDED, 60_226_959_360),
        (LLAMA3_8B, {"dp": 8}, 144_544_702_464),
        (LLAMA3_8B_MTP, SHARDED, 61_862_799_360),
        (LLAMA3_8B, {"tp": 2, "pp": 4, **SHARDED}, 8_513_625_600),
        (GPT_24, SHARDED, 2_652_011_520),
    ],
)
def test_weights_and_optimizer(shape, layout, num_bytes):
    assert megatron_weight_and_optimizer_bytes(shape, MegatronLayout(**layout)) == num_bytes


def test_experts_are_divided_by_their_own_ranks():
    """B079: at TP 4, EP 8, expert TP 1 the experts' bytes are an eighth of them, not a quarter."""
    without = megatron_weight_and_optimizer_bytes(
        replace(MIXTRAL, num_experts=0, ffn=0), MegatronLayout(tp=4, dp=8, etp=1, ep=8)
    )
    held = megatron_weight_and_optimizer_bytes(MIXTRAL, MegatronLayout(tp=4, dp=8, etp=1, ep=8))
    routers = 32 * 4096 * 8
    assert held - without == 18 * (32 * 8 * 3 * 4096 * 14336 / 8 + routers)


@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [
        (TRUSTED, 38_730_268_672),
        ({"tp": 2, "pp": 4, "num_microbatches": 16, **TRUSTED}, 17_247_109_120),
        ({"tp": 2, "pp": 4, "vpp": 2, "num_microbatches": 16, **TRUSTED}, 23_714_775_040),
        ({}, 40_644_762_009.6),
        ({"tp": 2, "pp": 4, "num_microbatches": 16}, 24_944_640_000),
    ],
)
def test_activations(layout, num_bytes):
    assert megatron_activation_bytes(LLAMA3_8B, 8192, 1, MegatronLayout(**layout)) == pytest.approx(
        num_bytes, rel=1e-12
    )
