"""Whole runs with and without recompute are the same run; the automatic choice and its record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .test_resume import weights

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 1"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --num-layers 3"
)
CHOICES = {
    "selective": "--recompute-activations",
    "modules": "--recompute-granularity selective --recompute-modules core_attn layernorm activation",
    "mlp": "--recompute-granularity selective --recompute-modules mlp",
    "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "auto": "--recompute auto --memory-budget 1e-6",
}


# What normalises q and k behind attention adds up gradients in the order of their strides.
L2 = (
    "--hidden-size 128 --hidden-dropout 0 --attention-dropout 0 --qk-l2-norm --window-size 3 0 "
    "--micro-batch-size 1 --log-num-zeros-in-grad"
)


@pytest.mark.parametrize("model", [DROPOUT, LLAMA, L2], ids=["dropout", "llama", "l2"])
def test_a_run_is_the_same_bit_for_bit(train: Any, model: str) -> None:
    """B029: five steps of two microbatches each, dropout included; losses, weights, moments, resume."""
    whole = train("whole", f"{model} --train-iters 5")
    wanted = weights(whole)
    for name, flags in CHOICES.items():
        run = train(name, f"{model} --train-iters 5 {flags}")
        assert run.losses == whole.losses and run.valid_losses == whole.valid_losses
        saved = weights(run)
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[key], wanted[key]) for key in wanted), name
    cut = train("cut", f"{model} --train-iters 5 --exit-interval 2")
    resumed = train("cut", f"{model} --train-iters 5 {CHOICES['uniform']} --load {cut.folder}")
    assert resumed.losses == whole.losses


def test_the_record_says_what_was_chosen_what_it_saves_and_costs(train: Any) -> None:
    def choice(name: str, flags: str) -> dict[str, str]:
        choices = train(name, f"--train-iters 1 {flags}").summary["choices"]
        return next(each for each in choices if each["what"] == "recompute")

    stated = choice("stated", CHOICES["mlp"])
    assert stated["ran"] == "mlp" and "saves" in stated["why"] and "of a step's time" in stated["why"]
    small, large = choice("small", CHOICES["auto"]), choice("large", "--recompute auto")
    assert large["ran"] == "nothing" and "fit the budget" in large["why"]
    assert small["ran"] != "nothing" and "nothing fits the budget" in small["why"]
