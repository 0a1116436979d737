"""The automatic choice of recompute: the cheapest that fits, by exhaustive search on small models."""

from dataclasses import replace
from itertools import combinations

import pytest

from redline.config import InvalidConfigError, parse_args
from redline.formulas.memory import training_memory
from redline.formulas.recompute import MODULES, NOTHING, Recompute, full, selective
from redline.hardware import hardware_named
from redline.plan import make_plan

H200 = hardware_named("h200")
MODEL = "--preset llama3-8b --num-layers 6 --bf16 --train-iters 1 --seq-length 8192 --micro-batch-size 2"


def planned(words):
    config = parse_args(f"{MODEL} {words}".split()).config
    return make_plan(config, H200, config.model.vocab_size)


def every_choice(layers):
    for count in range(len(MODULES) + 1):
        for modules in combinations(MODULES, count):
            for block in range(layers + 1):
                yield Recompute(modules=frozenset(modules), unit=1 if block else 0, layers=block or None)
    yield from (full("uniform", unit) for unit in range(1, layers + 1))


@pytest.mark.parametrize("budget", [0.25, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.95])
def test_auto_is_the_cheapest_that_fits(budget):
    plan = planned(f"--recompute auto --memory-budget {budget}")
    limit = round(budget * H200.memory_bytes)

    def needed(choice):
        microbatch = replace(plan.microbatch, recompute=choice)
        return training_memory(plan.shape, microbatch, plan.dtypes).reserved

    fitting = [each for each in every_choice(plan.shape.num_layers) if needed(each) <= limit]
    chosen = plan.microbatch.recompute
    if not fitting:
        assert "nothing fits" in plan.choices[-1].why
        least = min(map(needed, every_choice(plan.shape.num_layers)))
        assert plan.memory.reserved == pytest.approx(least, rel=0.01)
        return
    assert plan.memory.reserved <= limit
    cheapest = min(plan.recompute_cost.share(each, plan.shape.num_layers) for each in fitting)
    assert plan.recompute_cost.share(chosen, plan.shape.num_layers) == pytest.approx(cheapest)
    assert (chosen == NOTHING) == (needed(NOTHING) <= limit)


def test_kernels_chosen_later_are_taken_into_account():
    """Plain operators keep more than fused ones: what fitted with kernels need not fit without."""
    plan = planned("--recompute auto --memory-budget 0.5")
    local = plan.with_implementation("flash", frozenset())
    assert plan.microbatch.recompute != local.microbatch.recompute
    assert [choice.what for choice in local.choices].count("recompute") == 1


def test_offload_says_its_bytes_and_time():
    """Six of eight layers: what leaves the device, and what copies take at least beyond computing.

    An H200 measured 12.76 GiB less at the peak, for 62 % of a step.
    """
    words = "--num-layers 8 --cpu-offloading --cpu-offloading-num-layers"
    plan, all_but_two = planned(f"{words} 8"), planned(f"{words} 6")
    host = all_but_two.memory.fullest.host["activations"]
    assert host == pytest.approx(planned("--num-layers 8").memory.total - all_but_two.memory.total)
    assert host == pytest.approx(12.76 * 2**30, rel=0.01)
    assert plan.memory.fullest.host["activations"] == pytest.approx(8 / 6 * host)
    (choice,) = [each for each in all_but_two.choices if each.what == "activation-offload"]
    assert choice.why.startswith("12.7") and "GiB in pinned host memory" in choice.why
    share = float(choice.why.split("at least ")[1].split("%")[0])
    assert 20 < share < 62
    both = planned(f"{words} 6 --optimizer-cpu-offload")
    (states,) = [each for each in both.choices if each.what == "optimizer-offload"]
    assert states.why == planned("--num-layers 8 --optimizer-cpu-offload").choices[-1].why


def test_cost_follows_what_runs_again():
    cost, layers = planned("").recompute_cost, 6
    assert cost.share(NOTHING, layers) == 0
    whole = cost.share(full("uniform", 3), layers)
    assert 0.2 < whole < 0.35  # a forward is a third of a step, less the head's part
    assert cost.share(full("block", 3), layers) == pytest.approx(whole / 2)
    cheap = cost.share(selective(["layernorm", "activation"]), layers)
    assert 0 < cheap < 0.03 < cost.share(selective(["mlp"]), layers) < whole
    both = cost.share(selective(["mlp", "activation"]), layers)
    assert both == pytest.approx(cost.share(selective(["mlp"]), layers))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--recompute auto --recompute-activations", "recompute-auto-or-stated"),
        ("--recompute-activations --recompute-modules moe", "recompute-modules-exist"),
        ("--recompute-activations --recompute-modules mla_up_proj", "recompute-modules-exist"),
        ("--memory-budget 0.5", "needs/memory-budget"),
    ],
)
def test_refused(words, rule):
    with pytest.raises(InvalidConfigError, match=rule):
        planned(words)
