"""What a plan says of optimizer states in host memory: bytes, and the time they travel."""

import shlex

import pytest

from redline.config import parse_args
from redline.hardware import detect_cpu, hardware_named
from redline.plan import make_plan
from redline.plan.cost import predict
from redline.plan.cost_rates import rates_of
from redline.plan.cost_setup import setup_of

EIGHT = "--preset llama3-8b --bf16 --train-iters 1 --seq-length 8192 --micro-batch-size 1"


def said(flags, hardware):
    config = parse_args(shlex.split(f"{EIGHT} {flags}")).config
    plan = make_plan(config, hardware, config.model.vocab_size)
    return next((each for each in plan.choices if each.what == "optimizer-offload"), None)


def test_bytes_and_seconds():
    """12 bytes of 8.03e9 parameters over 85 % of 64 GB/s; in turn twice that."""
    h200 = hardware_named("h200")
    assert said("", h200) is None
    whole = said("--optimizer-cpu-offload", h200)
    seconds = 12 * 8.03e9 / (0.85 * h200.pcie_bytes_per_s)
    assert whole.why == (
        "89.75 GiB in pinned host memory, which come and go in each step, both ways at once: "
        f"about {seconds:.2f} s"
    )
    in_turn = said("--optimizer-cpu-offload --no-overlap-cpu-optimizer-d2h-h2d", h200)
    assert in_turn.why.endswith(f"one way after the other: about {2 * seconds:.2f} s")
    half = said("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", h200)
    assert half.ran == "50% of the states" and f"about {seconds * 500:.0f} ms" in half.why


@pytest.mark.parametrize("share", ["1.0", "0.5"])
def test_a_cpu_saves_nothing(share):
    found = said(f"--optimizer-cpu-offload --optimizer-offload-fraction {share}", detect_cpu())
    assert "saves nothing" in found.why


@pytest.mark.parametrize("dp", [1, 8])
def test_the_planner_counts_the_same(dp):
    """What leaves the device in the cost model is what storage says, and the way is in its time of a step."""
    h200 = hardware_named("h200")

    def cost(flags):
        sharded = "--use-distributed-optimizer" if dp > 1 else ""
        config = parse_args(shlex.split(f"{EIGHT} {sharded} {flags}")).config
        return predict(setup_of(config, dp), rates_of(h200))

    here, away = cost(""), cost("--optimizer-cpu-offload")
    coded = cost("--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8")
    held = here.memory.optimizer / 12
    assert away.memory.optimizer == 0 and held * dp == pytest.approx(8.03e9, rel=1e-3)
    assert coded.memory.optimizer == pytest.approx(held * (2 + 2.0625))
    seconds = 12 * held / (0.85 * h200.pcie_bytes_per_s)
    assert away.step_s - here.step_s == pytest.approx(seconds, rel=1e-6)


def test_the_storage_that_only_bf16_has_is_said_not_to_act_elsewhere():
    def said(words):
        config = parse_args(f"--preset llama3.2-1b --train-iters 1 {words}".split()).config
        choices = make_plan(config, hardware_named("h200"), config.model.vocab_size).choices
        return [str(each) for each in choices if each.what == "main-parameters"]

    aware = "--use-precision-aware-optimizer"
    assert not said(f"--bf16 {aware}") and not said("--fp16")
    for name in ("fp16", "fp32"):
        assert f"those of {name} stay as they are" in said(f"--{name} {aware}")[0]
