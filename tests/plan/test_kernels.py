"""Which operators run fused: a switch changes exactly its own; what is asked for by name is never dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redline.config import KernelsConfig
from redline.errors import ConfigError
from redline.formulas.operators import OPERATORS
from redline.formulas.shape import ModelShape
from redline.plan import Conditions, choose_kernels, kernels

GPT = ModelShape(
    num_layers=2, hidden=64, ffn=256, num_heads=4, num_groups=4, head_dim=16, vocab_size=100,
    padded_vocab_size=128, max_positions=64,
)  # fmt: skip
LLAMA = replace(
    GPT, activation="swiglu", normalization="RMSNorm", position="rope", bias_linear=False, qk_norm="norm"
)
GPU = Conditions(device="cuda", precision="bf16", attention="unfused")
CPU = Conditions(device="cpu", precision="fp32", attention="unfused", why_not="there is no GPU")
SWITCHES = {
    "persist_layer_norm": {"norm", "qk_norm"},
    "rope_fusion": {"rope"},
    "bias_swiglu_fusion": {"activation"},
    "bias_dropout_fusion": {"bias_dropout_add"},
    "masked_softmax_fusion": {"masked_softmax"},
    "cross_entropy_loss_fusion": {"linear_cross_entropy"},
    "embedding_fusion": {"embedding"},
    "adamw_fusion": {"adamw"},
    "grad_norm_fusion": {"grad_norm"},
}
ALL = OPERATORS - {"cross_entropy"}


def choose(shape=LLAMA, conditions=GPU, **values):
    return choose_kernels(KernelsConfig(**values), shape, conditions)


def ran(choice):
    return {each.what: each.ran for each in choice.choices}


def test_auto_is_fused_on_a_gpu_and_local_elsewhere():
    assert choose().fused == ALL
    assert choose(conditions=CPU).fused == frozenset()
    assert choose(conditions=replace(CPU, why_not=None)).fused == frozenset()  # interpreted only by name
    without = choose(conditions=replace(GPU, why_not="the package triton is not installed"))
    assert without.fused == frozenset() and "not installed" in without.choices[0].why
    double = choose(conditions=replace(GPU, precision="fp64"))
    assert double.fused == frozenset() and "fp64" in double.choices[0].why


def test_by_name():
    assert choose(transformer_impl="fused").fused == ALL
    assert choose(transformer_impl="fused", conditions=replace(CPU, why_not=None)).fused == ALL
    assert choose(transformer_impl="local").fused == frozenset()
    for conditions in (CPU, replace(GPU, precision="fp64")):
        with pytest.raises(ConfigError, match="--transformer-impl fused cannot run here"):
            choose(transformer_impl="fused", conditions=conditions)


def test_modules_of_nvidias_package_by_name():
    """Beside them every operator runs as under fused; where they cannot run, nothing runs in their stead."""
    found = choose(transformer_impl="transformer_engine")
    assert found.fused == ALL and found.choices[0].ran == "transformer_engine"
    assert "bias-swiglu-fusion" not in ran(found)  # the activation is one of its modules'
    missing = replace(GPU, why_no_engine="the package transformer-engine is not installed")
    for conditions in (missing, CPU, replace(GPU, precision="fp64")):
        with pytest.raises(ConfigError) as caught:
            choose(transformer_impl="transformer_engine", conditions=conditions)
        said = str(caught.value)
        assert "--transformer-impl fused, which needs no package" in said
        assert (
            conditions.precision == "fp64" or "transformer-engine" in said.split("why:")[1].split("mend:")[0]
        )


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_changes_exactly_its_operator(switch):
    own = SWITCHES[switch]
    assert choose(**{switch: False}).fused == ALL - own
    into_local = choose(transformer_impl="local", **{switch: True})
    assert into_local.fused == own
    assert ran(into_local) == {"transformer-impl": "local", switch.replace("_", "-"): "fused"}
    off = choose(**{switch: False}).choices
    (choice,) = [each for each in off if each.what == switch.replace("_", "-")]
    assert (choice.asked, choice.ran) == ("local", "local") and "switched off" in choice.why
    with pytest.raises(ConfigError, match=r"cannot be obeyed\.\n +why: +there is no GPU"):
        choose(conditions=CPU, **{switch: True})
    assert choose(conditions=CPU, **{switch: False}).fused == frozenset()


@pytest.mark.parametrize("kind", ["gelu", "gelu-tanh", "geglu", "quick-geglu", "swiglu", "squared-relu"])
def test_activations(kind):
    shape = replace(GPT, activation=kind)
    assert "activation" in choose(shape).fused
    switch, other = ("bias_swiglu_fusion", "bias_gelu_fusion")[:: 1 if kind == "swiglu" else -1]
    with pytest.raises(ConfigError, match=f"the model's activation is {kind}"):
        choose(shape, **{other: True})
    assert choose(shape, **{other: False}).fused == choose(shape).fused  # there is nothing to switch off
    assert "activation" not in choose(shape, **{switch: False}).fused


def test_the_residual_norm_runs_where_it_is_asked_for():
    """It is a form of the fused RMSNorm, and no part of `fused`."""
    asked = choose(fused_residual_rmsnorm=True)
    assert asked.fused == ALL | {"residual_norm"} and ran(asked)["fused-residual-rmsnorm"] == "fused"
    alone = choose(transformer_impl="local", persist_layer_norm=True, fused_residual_rmsnorm=True)
    assert alone.fused == {"norm", "qk_norm", "residual_norm"}
    with pytest.raises(ConfigError, match="the model's norm is LayerNorm"):
        choose(GPT, fused_residual_rmsnorm=True)
    for values in ({"transformer_impl": "local"}, {"persist_layer_norm": False}):
        with pytest.raises(ConfigError, match="the norms run in plain PyTorch"):
            choose(fused_residual_rmsnorm=True, **values)


def test_what_the_model_does_not_have_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="turns no queries or keys"):
        choose(GPT, rope_fusion=True)
    with pytest.raises(ConfigError, match="flash attention has no softmax of its own"):
        choose(conditions=replace(GPU, attention="flash"), masked_softmax_fusion=True)
    assert "rope-fusion" not in ran(choose(GPT))


@pytest.mark.parametrize("impl", ["fused", "local"])
def test_a_switch_with_nothing_to_switch_off_is_said(impl):
    flash = replace(GPU, attention="flash")
    for name, shape, why in (
        ("bias_gelu_fusion", LLAMA, "the model's activation is swiglu"),
        ("rope_fusion", GPT, "the model turns no queries or keys"),
        ("masked_softmax_fusion", GPT, "flash attention has no softmax of its own"),
    ):
        found = choose(shape, flash, transformer_impl=impl, **{name: False})
        (choice,) = [each for each in found.choices if each.what == name.replace("_", "-")]
        assert (choice.asked, choice.ran, choice.why) == ("local", "local", f"nothing to switch off: {why}")
        assert found.fused == choose(shape, flash, transformer_impl=impl).fused


def test_every_operator_has_a_switch_and_is_in_the_record():
    """What an option switches is one place of the code, which the page of the operators repeats."""
    assert {each for operators in kernels.SWITCHES.values() for each in operators} == OPERATORS
    assert kernels.SWITCHES.keys() - {"bias_gelu_fusion"} == SWITCHES.keys()
    recorded = {f"{name.replace('_', '-')}" for name in SWITCHES}
    assert ran(choose()) == {"transformer-impl": "fused", **dict.fromkeys(recorded, "fused")}
    assert ran(choose(transformer_impl="local")) == {"transformer-impl": "local"}


def test_two_kinds_of_fused_loss():
    native = choose(cross_entropy_fusion_impl="native")
    assert native.fused == OPERATORS - {"linear_cross_entropy"}
    for values in ({"transformer_impl": "local"}, {"cross_entropy_loss_fusion": False}):
        with pytest.raises(ConfigError, match="native has no effect"):
            choose(cross_entropy_fusion_impl="native", **values)
    alone = choose(
        transformer_impl="local", cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native"
    )
    assert alone.fused == {"cross_entropy"}


def test_a_model_too_wide_for_one_kernel_loses_that_one():
    """Norm and q/k norm share a switch, and no limit: each is fused where its own kernel takes the model."""
    wide, head = "a hidden size of 40000 is above 32768", "a head of 4096 channels is above 2048"
    for limits, lost, said in (
        ({"norm": wide}, {"norm"}, ("qk norm fused, norm local", wide)),
        ({"qk_norm": head}, {"qk_norm"}, ("norm fused, qk norm local", head)),
        ({"norm": wide, "qk_norm": head}, {"norm", "qk_norm"}, ("local", f"{wide}; {head}")),
    ):
        limited = replace(GPU, limits=limits)
        found = choose(conditions=limited)
        assert found.fused == ALL - lost
        (choice,) = [each for each in found.choices if each.what == "persist-layer-norm"]
        assert (choice.asked, choice.ran, choice.why) == ("auto", *said)
        with pytest.raises(ConfigError, match=said[1]):
            choose(conditions=limited, persist_layer_norm=True)


@pytest.mark.parametrize(("shape", "operators"), [(GPT, "norm"), (LLAMA, "norm and qk norm")])
def test_the_record_names_what_the_model_has(shape, operators):
    (choice,) = [each for each in choose(shape).choices if each.what == "persist-layer-norm"]
    assert choice.why == f"one kernel for {operators}"
    assert ("qk_norm" in choose(shape).fused) == ("qk" in operators)
